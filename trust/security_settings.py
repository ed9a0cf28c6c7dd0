"""What settings of processes leave open: their files, one after the other."""

from __future__ import annotations

import datetime as dt
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvferry.doctor.finding import Finding, Subject, fail, ok, warn
from kvferry.proto.address import parse_address
from kvferry.trust.doctor_checks import certificates
from kvferry.trust.doors import is_loopback
from kvferry.trust.errors import TrustError
from kvferry.trust.files import reason_of
from kvferry.trust.tls_folder import REVOKED_FILE
from kvferry.trust.tokens import read_tokens

ROLES: Final = ("coordinator", "gateway", "node")

_VARIABLE: Final = re.compile(r"\s*(?:export\s+)?KVFERRY_(COORDINATOR|GATEWAY|NODE)_([A-Z_]+)=(.*)")

_YES: Final = ("true", "1", "yes", "on")

_SHARED: Final = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class Process:
    """What a file says about one process. ``where``: the file's name, which each finding begins with."""

    where: str
    role: str
    settings: Mapping[str, Any]

    def is_on(self, name: str) -> bool:
        """A switch, which in the environment is a text."""
        value = self.settings.get(name, False)
        return value.lower() in _YES if isinstance(value, str) else bool(value)

    def path(self, name: str) -> Path | None:
        """A file or folder that is named."""
        value = self.settings.get(name)
        return None if value in (None, "") else Path(str(value))

    def why_no_address(self, name: str) -> str | None:
        """What is wrong with a setting that should be one; None when it is, or is not given."""
        try:
            parse_address(str(self.settings.get(name, "localhost:0")), to_listen=True)
        except ValueError as error:
            return str(error)
        return None

    def reaches_others(self, name: str) -> str | None:
        """HOST:PORT of a setting, if others than this machine reach it."""
        address = self.settings.get(name)
        try:
            host, _ = parse_address(str(address), to_listen=True)
        except ValueError:
            return None
        return None if is_loopback(host) else str(address)


def processes_in(place: Path) -> list[Process]:
    """Of a file, or of all ``.toml`` and ``.env`` files in a folder. Raises OSError, ValueError."""
    files = sorted([*place.glob("*.toml"), *place.glob("*.env")]) if place.is_dir() else [place]
    return [process for file in files for process in _of_file(file)]


def _of_file(file: Path) -> list[Process]:
    if file.suffix == ".env":
        by_role: dict[str, dict[str, Any]] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            if match := _VARIABLE.fullmatch(line):
                by_role.setdefault(match[1].lower(), {})[match[2].lower()] = match[3].strip().strip("\"'")
        return [Process(file.name, role, settings) for role, settings in by_role.items()]
    settings = tomllib.loads(file.read_text(encoding="utf-8"))
    return [Process(file.name, _role_of(file, settings), settings)]


def _role_of(file: Path, settings: Mapping[str, Any]) -> str:
    """By the file's name, else by what only one of them has."""
    if named := next((role for role in ROLES if role in file.stem), None):
        return named
    if settings.keys() & {"state", "registry", "tokens", "lease"}:
        return "coordinator"
    return "gateway" if settings.keys() & {"https", "https_cert", "allow_kill", "patience_seconds"} else "node"


def findings_of(process: Process) -> Iterator[Finding]:
    """Everything that is worth saying, and what to do about it."""
    checks = [_listener, _certificate, _reflection, _metrics]
    checks += {"coordinator": [_tokens, _registry, _snapshots], "node": [_snapshots], "gateway": [_kill]}[process.role]
    for check in checks:
        yield from check(process)


def _listener(process: Process) -> Iterator[Finding]:
    check = f"{process.where}: listens"
    address = process.reaches_others("listen")
    protected = process.path("tls_dir") is not None
    advice = "give tls_dir (kvferry certs), and take insecure_plaintext out"
    if process.role == "gateway":
        protected = process.is_on("https") or process.path("https_cert") is not None
        advice = "give https with tls_dir, or https_cert and https_key; or listen at 127.0.0.1 behind a proxy"
    if (reason := process.why_no_address("listen")) is not None:
        yield fail(check, reason, means="it does not start, and nothing is known about it", advice="give HOST:PORT")
    elif address is None:
        yield ok(check, "on this machine only")
    elif protected:
        yield ok(check, f"at {address}, with certificates")
    else:
        means = "whoever is on the network is let in, and can read and change everything"
        yield fail(check, f"at {address}, in plaintext", means=means, advice=advice)


def _certificate(process: Process) -> Iterator[Finding]:
    folder = process.path("tls_dir")
    if folder is None:
        return
    for finding in certificates(Subject(tls_dir=folder)):
        yield Finding(
            f"{process.where}: {finding.check}", finding.verdict, finding.found, finding.means, finding.advice
        )
    if not (folder / REVOKED_FILE).exists():
        yield warn(
            f"{process.where}: {REVOKED_FILE}", "is not there",
            means="a certificate that was revoked is still believed here",
            advice="copy the authority's revoked.pem into the folder, now and after each kvferry certs revoke",
        )  # fmt: skip


def _reflection(process: Process) -> Iterator[Finding]:
    if process.is_on("reflection"):
        yield warn(
            f"{process.where}: reflection", "is on", means="the server tells what can be called",
            advice="take it out: it is of use to developers only",
        )  # fmt: skip


def _metrics(process: Process) -> Iterator[Finding]:
    if (address := process.reaches_others("metrics")) is not None:
        yield warn(
            f"{process.where}: metrics", f"can be read by all who reach {address}",
            means="numbers only, no text and no names of sessions; still more than a stranger has to know",
            advice="let only the monitor reach that port (a firewall), or listen at 127.0.0.1",
        )  # fmt: skip


def _tokens(process: Process) -> Iterator[Finding]:
    check, path = f"{process.where}: tokens", process.path("tokens")
    if path is None:
        if process.reaches_others("listen") is not None:
            means = "whoever is let in sees the conversations of all, and may ask without a limit"
            yield warn(
                check, "are not asked for", means=means, advice="make some with kvferry tokens add, and give tokens"
            )
        return
    try:
        found, mode = read_tokens(path), path.stat().st_mode
    except TrustError as error:
        yield fail(check, str(error), means="the coordinator does not start", advice="kvferry tokens add")
        return
    if mode & _SHARED:
        means = "others of this machine read whose tokens there are, or change them"
        yield warn(check, f"{path} has mode {stat.S_IMODE(mode):o}", means=means, advice=f"chmod 600 {path}")
    valid = [token for token in found if token.state(dt.datetime.now(dt.UTC)) == "valid"]
    if endless := [token.id for token in valid if token.expires_at is None]:
        means = "what leaks is good until somebody notices"
        yield warn(check, f"{len(endless)} never expire ({', '.join(endless[:5])})", means=means, advice="add --days")
    if free := [t.id for t in valid if t.requests_per_minute is None and t.concurrent_turns is None]:
        means = "one caller can keep the whole fleet busy"
        advice = "give --requests-per-minute and --concurrent-turns"
        yield warn(check, f"{len(free)} have no limit ({', '.join(free[:5])})", means=means, advice=advice)
    yield ok(check, f"{len(valid)} are valid")


def _registry(process: Process) -> Iterator[Finding]:
    scheme, _, rest = str(process.settings.get("registry", "")).partition("://")
    for member in rest.partition("/")[0].split(",") if scheme == "etcd" else ():
        if not is_loopback(member.rpartition(":")[0]):
            yield fail(
                f"{process.where}: registry", f"etcd at {member} is asked in plaintext",
                means="whoever reaches it reads and changes every conversation",
                advice="let etcd ask for certificates, and say etcds://",
            )  # fmt: skip
            return


def _snapshots(process: Process) -> Iterator[Finding]:
    check = f"{process.where}: snapshots"
    if process.settings.get("store") in (None, ""):
        return
    key = process.path("store_key_file")
    if key is None:
        means = "whoever writes to the store can have a model say what he likes, and whoever reads it has the prompts"
        yield warn(
            check, "are neither signed nor encrypted", means=means, advice="give store_key_file, store_encrypted"
        )
        return
    try:
        mode = key.stat().st_mode
    except OSError as error:
        yield fail(check, f"{key}: {reason_of(error)}", means="the store cannot be opened", advice="put the key there")
        return
    if mode & _SHARED:
        means = "others of this machine can sign snapshots, and read them"
        yield fail(check, f"{key} has mode {stat.S_IMODE(mode):o}", means=means, advice=f"chmod 600 {key}")
    elif not process.is_on("store_encrypted"):
        means = "whoever reads the store has what was said"
        yield warn(check, "are signed, not encrypted", means=means, advice="set store_encrypted on all of the fleet")
    else:
        yield ok(check, "are encrypted")


def _kill(process: Process) -> Iterator[Finding]:
    if process.is_on("allow_kill") and process.reaches_others("listen") is not None:
        means = "whoever opens the page can kill nodes"
        yield fail(f"{process.where}: allow_kill", "is on", means=means, advice="take it out: it is for kvferry up")
