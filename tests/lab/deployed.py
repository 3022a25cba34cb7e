# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A replica that was deployed on hosts of the lab, as tests look at it and break it: rank n on the n-th host, everything by console."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from lab.lab_hosts import Lab

ASK = """import json, sys, urllib.request
body = json.dumps({"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}).encode()
request = urllib.request.Request(sys.argv[1] + "/v1/chat/completions", body, {"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=10))["usage"]["completion_tokens"])"""


def until(true: Callable[[], Any], seconds: float, what: Callable[[], object]) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what()}"
        time.sleep(0.2)
    return value


@dataclasses.dataclass(frozen=True)
class Deployed:
    """`programs`: for each host, what the command line of its engine begins with, as pgrep -f takes it."""

    lab: Lab
    hosts: Sequence[str]
    programs: Sequence[str]
    silent_seconds: int

    def state(self, host: str) -> dict[str, Any]:
        text = self.lab.console(host, "cat /run/rankzero/lab/state.json", check=False).stdout
        return dict(json.loads(text)) if text.startswith("{") else {}

    def states(self, hosts: Sequence[str] | None = None) -> list[dict[str, Any]]:
        return [self.state(host) for host in hosts or self.hosts]

    def told(self) -> object:
        return [(one.get("stage"), one.get("detail"), one.get("last_end")) for one in self.states()]

    def answers(self) -> bool:
        url = json.loads(self.lab.console(self.hosts[0], "cat /etc/rankzero/lab/current/launch.json").stdout)["ready"]["url"]
        return self.lab.console(self.hosts[0], f"python3 -c '{ASK}' {url}", check=False).stdout.strip().isdecimal()

    def serving(self, other_than: str | None = None, seconds: float = 90) -> str:
        """Until all hosts run one run, another than `other_than`, and rank 0 generates; its id."""

        def there() -> str | None:
            seen = self.states()
            ids = {one.get("run_id") for one in seen}
            together = len(ids) == 1 and not ids & {other_than, None} and all(one.get("stage") == "running" for one in seen)
            return str(seen[0]["run_id"]) if together and self.answers() else None

        return str(until(there, seconds, self.told))

    def engine(self, rank: int) -> int:
        """The oldest process of the engine on this rank's host."""
        return int(self.lab.console(self.hosts[rank], f"pgrep -of '{self.programs[rank]}'").stdout)

    def main_pid(self, rank: int) -> int:
        return int(self.lab.console(self.hosts[rank], "systemctl show -P MainPID inference-lab").stdout)

    def send(self, rank: int, signal: str, pid: int) -> None:
        self.lab.console(self.hosts[rank], f"kill -{signal} {pid}")

    def marked(self, rank: int, run: str) -> list[str]:
        """Processes on a host that carry the marker of this run."""
        found = self.lab.console(self.hosts[rank], f"grep -lsz '^RANKZERO_SHARD=lab/{rank}/{run}$' /proc/[0-9]*/environ", check=False).stdout
        return found.split()

    def with_all_its_chances(self) -> str:
        """Serving, with no failed run that counts; the run's id."""
        before = self.serving()
        if self.state(self.hosts[0]).get("failures"):
            self.lab.console(self.hosts[0], "systemctl restart inference-lab")
            before = self.serving(other_than=before)
        return before

    def came_back(self, before: str, rank: int | None = None, kinds: Sequence[str] = ("launch",), seconds: float = 90) -> list[dict[str, Any]]:
        """Serving again by itself, as a whole and without anything of the run before; what every host says of its end."""
        self.serving(other_than=before, seconds=seconds)
        for number in range(len(self.hosts)):
            assert self.marked(number, before) == [], f"rank {number} still has processes of the run before"
        ends = [dict(one["last_end"]) for one in self.states() if one["last_end"]]  # a host that was off remembers none
        assert ends
        if rank is not None:
            assert all(end["rank"] == rank and end["kind"] in kinds for end in ends), ends
        return ends
