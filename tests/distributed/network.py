"""Simulated machines: network namespaces linked by a bridge, with links of a given rate.

python -m tests.distributed.network --ranks 4 --rate 100mbit -- examples/ring.py --mask none --length 4096
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A namespace with one link to the others."""

    name: str
    address: str

    def run(self, *command: str, **given: object) -> subprocess.Popen:
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command], **given)  # type: ignore[call-overload]

    def sent(self) -> int:
        """The bytes sent on the link, including headers."""
        with self.run("cat", "/sys/class/net/out/statistics/tx_bytes", stdout=subprocess.PIPE, text=True) as process:
            return int(process.stdout.read())


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


def why_not() -> str:
    """The reason why namespaces are not available, or an empty string."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "network namespaces need ip and tc, of iproute2"
    try:
        with machines(1, "100mbit"):
            return ""
    except (subprocess.SubprocessError, OSError) as error:
        return f"network namespaces are not available: {error}"


@contextmanager
def machines(ranks: int, rate: str) -> Iterator[list[Machine]]:
    """Create `ranks` namespaces with links of this rate, and remove them on exit."""
    mark = f"regard{os.getpid()}"
    with ExitStack() as stack:

        def namespace(name: str) -> str:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            return name

        hub = namespace(f"{mark}hub")
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        results = []
        for rank in range(ranks):
            one = Machine(namespace(f"{mark}n{rank}"), f"10.77.0.{rank + 1}")
            ip("-n", hub, "link", "add", f"to{rank}", "type", "veth", "peer", "name", "out", "netns", one.name)
            ip("-n", hub, "link", "set", f"to{rank}", "master", "bridge", "up")
            ip("-n", one.name, "address", "add", f"{one.address}/24", "dev", "out")
            for link in ("lo", "out"):
                ip("-n", one.name, "link", "set", link, "up")
            shape = ("qdisc", "add", "dev", "out", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms")
            with one.run("tc", *shape, stderr=subprocess.PIPE, text=True) as done:
                if done.wait(20):
                    raise OSError(done.stderr.read())
            results.append(one)
        yield results


def run(ranks: int, rate: str, script: Sequence[str], seconds: float) -> tuple[list[str], list[int]]:
    """Run a program on every machine, like torchrun; return the output and the sent bytes of each."""
    with machines(ranks, rate) as network:
        processes = []
        for rank, machine in enumerate(network):
            place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "MASTER_ADDR": network[0].address}
            place |= {"MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": "out"}
            given = os.environ | {name: str(value) for name, value in place.items()}
            processes.append(
                machine.run(
                    sys.executable, *script, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        try:
            printed = [process.communicate(timeout=seconds)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode for process in processes):
            raise RuntimeError("\n".join(printed))
        return printed, [machine.sent() for machine in network]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("script", nargs="+")
    options = parser.parse_args()
    printed, sent = run(options.ranks, options.rate, options.script, options.seconds)
    print(printed[0] + f"links of {options.rate}; sent, headers and all: {[f'{n / 1e6:.2f} MB' for n in sent]}")
