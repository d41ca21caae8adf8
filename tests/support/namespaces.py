"""Simulates two hosts: network namespaces joined by a virtual cable (Linux, root).

    def test_something(two_hosts):
        first, second = two_hosts
        process = first.start([sys.executable, "-m", "launch", ...])

A test file loads the fixture with `pytest_plugins = ["tests.support.namespaces"]`.
"""

import contextlib
import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest


@dataclasses.dataclass
class Host:
    """A network namespace. It has its own loopback, its own ports, and one link to the other."""

    name: str
    address: str

    def start(self, command: list[str], **options) -> subprocess.Popen:
        """Starts a command on the host; `options` are those of `subprocess.Popen`.

        `ip` replaces itself by the command, so signals reach the command.
        """
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command], **options)

    def processes(self) -> list[int]:
        """Returns the processes of the host."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]


@contextlib.contextmanager
def joined_hosts() -> Iterator[tuple[Host, Host]]:
    """Creates two hosts that reach only each other, and removes them afterwards.

    Names and addresses contain the process id, so that test runs do not collide.
    """
    pid = os.getpid()
    hosts = tuple(Host(f"recipes-{pid}-{i}", f"10.77.{pid % 256}.{i + 1}") for i in range(2))

    def ip(*arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
        assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"

    try:
        for host in hosts:
            ip("netns", "add", host.name)
        first, second = (host.name for host in hosts)
        peer = ["type", "veth", "peer", "name", "wire", "netns", second]
        ip("link", "add", "name", "wire", "netns", first, *peer)
        for host in hosts:
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "wire")
            ip("-n", host.name, "link", "set", "lo", "up")
            ip("-n", host.name, "link", "set", "wire", "up")
        yield hosts
    finally:
        for host in hosts:
            for process in host.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, 9)
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)


@pytest.fixture
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Creates two joined hosts. Fails without namespaces: a skipped test would go unnoticed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.fail(
            "namespaces need root and `ip`; without: make check-long ARGS='-k \"not hosts\"'"
        )
    with joined_hosts() as hosts:
        yield hosts
