"""`kvferry doctor`: real machine, real ports, real certificates; what this machine does not have is given as files."""

from __future__ import annotations

import ipaddress
import json
import os
import resource
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvferry.doctor import Finding, Subject, Verdict
from kvferry.doctor import cli as doctor_cli
from kvferry.doctor.machine import clock, file_limit, kernel_settings, machine, port
from kvferry.store.doctor_checks import Mount, mount_findings, mount_of, store
from kvferry.trust.doctor_checks import certificates

OK, WARN, FAIL = Verdict.OK, Verdict.WARN, Verdict.FAIL
NOW = datetime.now(UTC)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(doctor_cli.doctor, arguments)


def by_check(findings: object) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}  # type: ignore[attr-defined]


def test_all_rooms_are_asked_and_the_machine_of_the_tests_is_well(tmp_path: Path) -> None:
    said = run("--quick", "--json", "--store", str(tmp_path))
    told = json.loads(said.stdout)
    assert (said.exit_code, told["ok"]) == (0, True), told
    checks = {finding["check"] for finding in told["findings"]}
    assert {"python", "clock", "open files", "store", "store mount", "store writes", "kernel path", "memory"} <= checks
    for finding in told["findings"]:
        assert finding["verdict"] == "ok" or (finding["means"] and finding["advice"]), finding
    assert not list(tmp_path.iterdir())


def test_a_failure_is_told_with_what_to_do_and_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [point for point in doctor_cli.entry_points(group=doctor_cli.GROUP) if point.name == "store"]
    monkeypatch.setattr(doctor_cli, "entry_points", lambda **_: points)
    said = run("--store", str(tmp_path / "nowhere"))
    assert said.exit_code == 1
    assert said.output == (
        f"fail  store: there is no folder {tmp_path / 'nowhere'}\n      A node cannot save or restore.\n"
        "      Make it, or mount it.\n0 ok, 0 to look at, 1 failed\n"
    )


def test_a_check_that_breaks_leaves_the_others_to_be_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        name = "machine"

        def load(self) -> None:
            raise RuntimeError("no such thing")

    points = [point for point in doctor_cli.entry_points(group=doctor_cli.GROUP) if point.name == "certificates"]
    monkeypatch.setattr(doctor_cli, "entry_points", lambda **_: [*points, Broken()])
    (finding,) = doctor_cli.examine(Subject(quick=True))
    assert (finding.verdict, finding.found) == (FAIL, "RuntimeError: no such thing")


def test_a_nodes_file_says_what_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Subject] = []
    monkeypatch.setattr(doctor_cli, "examine", lambda subject: asked.append(subject) or iter(()))
    file = tmp_path / "node.toml"
    file.write_text('model = "m"\nstore = "/s"\nlisten = "127.0.0.1:7"\nkv_memory = "2GiB"\n')
    assert run("--config", str(file), "--store", "/other").exit_code == 0
    assert asked == [Subject(model="m", store="/other", listen=("127.0.0.1:7",), kv_bytes=2 << 30)]
    assert run("--config", str(tmp_path / "none.toml")).exit_code == 2
    assert run("--kv-memory", "much").exit_code == 2


def test_a_clock_that_is_wrong_or_that_nothing_sets() -> None:
    assert clock(3.0, 0).verdict is FAIL
    assert clock(NOW.timestamp(), 0x40).verdict is WARN
    assert clock(NOW.timestamp(), 0).verdict is OK
    assert clock(NOW.timestamp(), None).verdict is OK


@pytest.mark.parametrize(("limit", "verdict"), [(256, FAIL), (1024, WARN), (8192, OK)])
def test_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch, limit: int, verdict: Verdict) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, 1 << 20))
    assert file_limit().verdict is verdict


def test_huge_pages_and_governors(tmp_path: Path) -> None:
    assert list(kernel_settings(tmp_path)) == []
    pages = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    governor = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    for path, text in ((pages, "always madvise [never]\n"), (governor, "ondemand\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert [finding.verdict for finding in kernel_settings(tmp_path)] == [WARN, WARN]
    pages.write_text("always [madvise] never\n")
    governor.write_text("performance\n")
    assert [finding.verdict for finding in kernel_settings(tmp_path)] == [OK, OK]


def test_a_port_is_free_or_is_told_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        held = port(address)
        assert (held.verdict, f"pid {os.getpid()}" in held.found) == (FAIL if "kvferry" not in held.found else OK, True)
    assert port(address).verdict is OK
    assert port("127.0.0.1:0").verdict is OK
    assert port("192.0.2.1:7070").verdict is FAIL  # an address of documentations: of no machine
    assert port("nonsense").verdict is FAIL
    assert f"port {address}" in by_check(machine(Subject(listen=(address,))))


MOUNTINFO = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
90 22 0:45 / /mnt/a\\040b rw,{options} shared:9 - nfs4 server:/x rw,{system}
"""


@pytest.mark.parametrize(
    ("options", "system", "verdict", "words"),
    [
        ("noatime", "vers=4.2,hard,proto=tcp,lookupcache=pos", OK, ""),
        ("relatime", "vers=4.2,hard,proto=tcp,lookupcache=pos", WARN, "without noatime"),
        ("noatime", "vers=4.2,soft,proto=tcp,lookupcache=pos", WARN, "lose a write"),
        ("noatime", "vers=3,hard,proto=tcp", WARN, "may not be seen"),
    ],
)
def test_network_mounts_are_held_against_the_recommended_options(
    tmp_path: Path, options: str, system: str, verdict: Verdict, words: str
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTINFO.format(options=options, system=system))
    mount = mount_of(Path("/mnt/a b/store"), table)
    assert mount is not None
    assert (mount.kind, mount.point) == ("nfs4", "/mnt/a b")
    (finding,) = mount_findings(mount)
    assert finding.verdict is verdict
    assert words in finding.means
    assert mount_of(Path("/mnt/other"), table) == Mount("/", "ext4", frozenset({"rw", "relatime"}))


def test_a_stores_rates_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    found = by_check(store(Subject(store=str(tmp_path))))
    assert "written and synced" in found["store rate"].found
    assert not list(tmp_path.iterdir())
    assert by_check(store(Subject(store="ftp://x")))["store"].verdict is FAIL
    assert by_check(store(Subject(store="s3://b/p")))["store"].verdict is OK


def issue(folder: Path, *, days: int = 90, begins: int = -1, names: bool = True, authority: str = "CA") -> None:
    """A CA of this name, and a certificate of it."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    for file, subject, key in (("ca.pem", authority, keys[0]), ("cert.pem", "node", keys[1])):
        builder = (
            x509.CertificateBuilder().subject_name(named(subject)).issuer_name(named(authority))
            .public_key(key.public_key()).serial_number(x509.random_serial_number())
            .not_valid_before(NOW + timedelta(days=begins)).not_valid_after(NOW + timedelta(days=days))
        )  # fmt: skip
        if file == "cert.pem" and names:
            address = x509.IPAddress(ipaddress.ip_address("192.0.2.11"))
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        signed = builder.sign(keys[0], hashes.SHA256())
        (folder / file).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(keys[1].private_bytes(pem, form, serialization.NoEncryption()))
    (folder / "key.pem").chmod(0o600)


def test_certificates_that_are_well(tmp_path: Path) -> None:
    issue(tmp_path)
    found = by_check(certificates(Subject(tls_dir=tmp_path)))
    assert {finding.verdict for finding in found.values()} == {OK}
    assert found["names"].found == "192.0.2.11"
    assert not list(certificates(Subject()))


@pytest.mark.parametrize(
    ("told", "check", "verdict"),
    [
        ({"days": 3}, "cert.pem", WARN),
        ({"days": -1, "begins": -9}, "cert.pem", FAIL),
        ({"days": 9, "begins": 2}, "ca.pem", FAIL),
        ({"names": False}, "names", FAIL),
    ],
)
def test_certificates_that_are_not(tmp_path: Path, told: dict[str, int], check: str, verdict: Verdict) -> None:
    issue(tmp_path, **told)  # type: ignore[arg-type]
    finding = by_check(certificates(Subject(tls_dir=tmp_path)))[check]
    assert finding.verdict is verdict
    assert finding.means
    assert finding.advice


def test_files_of_certificates_that_do_not_belong_together(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        issue(tmp_path / name, authority=name)
    a = tmp_path / "a"
    (a / "key.pem").chmod(0o644)
    assert by_check(certificates(Subject(tls_dir=a)))["key.pem"].verdict is WARN
    (a / "key.pem").write_bytes((tmp_path / "b/key.pem").read_bytes())
    (a / "ca.pem").write_bytes((tmp_path / "b/ca.pem").read_bytes())
    found = by_check(certificates(Subject(tls_dir=a)))
    assert (found["key.pem"].verdict, found["issuer"].verdict) == (FAIL, FAIL)
    (a / "cert.pem").write_text("nonsense")
    assert by_check(certificates(Subject(tls_dir=a)))["cert.pem"].verdict is FAIL
    broken = "-----BEGIN CERTIFICATE-----\nbm9uZQ==\n-----END CERTIFICATE-----\n"
    (a / "ca.pem").write_text((tmp_path / "b/ca.pem").read_text() + broken)  # the second of two authorities
    assert by_check(certificates(Subject(tls_dir=a)))["ca.pem"].verdict is FAIL


def test_colours_are_for_terminals() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "kvferry.client.cli", "doctor", "--quick"], capture_output=True, timeout=100, check=False
    )
    assert said.returncode == 0, said
    assert b"\x1b" not in said.stdout
