# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a shard would see, for a shell: every variable of every launch with its reason."""

from __future__ import annotations

import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils.render import comment, env_value


def text(plan: t.Mapping[str, t.Any]) -> str:
    """One block for each launch of each rank, by rank. Pasted into a POSIX shell it sets exactly the launch's environment; secrets are named, not shown."""
    blocks = []
    for host, shard in sorted(plan["shards"].items(), key=lambda item: item[1]["rank"]):
        for launch in shard["launches"]:
            lines = ["# rank %d on %s, launch %s" % (shard["rank"], host, launch["name"])]
            for name, value in sorted(launch["env"].items()):
                lines.append("export %s=%s    # %s" % (name, env_value(value), comment(launch["why"].get(name, ""))))
            lines += ["# %s: %s" % (name, comment(launch["why"].get(name, "a secret"))) for name in launch["secret_env"]]
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
