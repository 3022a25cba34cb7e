# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The adapter of cuda_engine.py, laid by the tests into a collection of its own: engines of other collections come in by the same door."""

from __future__ import annotations

from ansible_collections.rankzero.inference.plugins.plugin_utils.engines.base import Engine, Launch, Shard


class Adapter(Engine):
    name = "cuda"
    needs_build = False
    falls_back_to_cpu = True
    key_protects = None
    program = "@PROGRAM@"

    def launches(self, shard: Shard) -> list[Launch]:
        args = (
            self.program,
            "serve",
            *shard.profile.args,
            "--host",
            shard.http_host,
            "--port",
            str(shard.http_port),
            "--model",
            shard.profile.served_model_name,
        )
        return [Launch(name="cuda-engine", path=shard.python, args=args)]

    def devices_command(self, shard: Shard) -> tuple[str, tuple[str, ...]]:
        return shard.python, (self.program, "devices")
