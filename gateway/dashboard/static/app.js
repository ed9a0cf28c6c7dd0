// The page's frame: tabs, the theme, and what starts.
import { startChat, showMe } from "/assets/chat.js";
import { startCluster } from "/assets/cluster.js";
import { byId, startTips, token } from "/assets/dom.js";
import { startDrills } from "/assets/drills.js";
import { on, startWatching } from "/assets/live.js";
import { startSessions } from "/assets/sessions.js";
import { startStore } from "/assets/store.js";

const tabs = [...document.querySelectorAll("[role=tab]")];
const opened = {}; // page → what it does when it is opened

export function openTab(id) {
  for (const tab of tabs) {
    const is = tab.getAttribute("aria-controls") === id;
    tab.setAttribute("aria-selected", is);
    tab.tabIndex = is ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !is;
  }
  // a first page without a fragment stays so: with one, the Tab key would begin behind the header
  if ((location.hash.slice(1).split("/")[0] || tabs[0].getAttribute("aria-controls")) !== id) history.replaceState(null, "", `#${id}`);
  opened[id]?.();
}

function startTabs() {
  tabs.forEach((tab, number) => {
    tab.onclick = () => openTab(tab.getAttribute("aria-controls"));
    tab.onkeydown = (event) => {
      const step = { ArrowRight: number + 1, ArrowLeft: number - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      const next = tabs[(step + tabs.length) % tabs.length];
      next.click();
      next.focus();
    };
  });
  const wanted = () => location.hash.slice(1).split("/")[0];
  const known = (id) => tabs.some((tab) => tab.getAttribute("aria-controls") === id);
  window.addEventListener("hashchange", () => known(wanted()) && openTab(wanted()));
  openTab(known(wanted()) ? wanted() : "cluster");
}

function startTheme() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const kept = localStorage.getItem("kvferry-theme");
  if (kept) root.dataset.theme = kept;
  byId("theme").onclick = () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
    root.dataset.theme = isDark ? "light" : "dark";
    localStorage.setItem("kvferry-theme", root.dataset.theme);
  };
}

function startAccess() {
  byId("token").value = token.get();
  byId("token").onchange = () => {
    token.set(byId("token").value);
    location.reload(); // all that is shown is of another caller now
  };
}

startTheme();
startAccess();
startTips();
on("trouble", (text) => { if (byId("connection").textContent !== text) byId("connection").textContent = text; });
startCluster();
startChat();
opened.sessions = startSessions();
opened.store = startStore();
opened.drills = startDrills();
byId("show-me").onclick = () => { openTab("chat"); showMe(); };
startTabs();
startWatching();
