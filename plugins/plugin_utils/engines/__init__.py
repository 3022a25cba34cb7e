# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Engine adapters. One engine is one file with one class C(Adapter).

An engine of another collection is named in full: C(engine: their.collection.name) loads
C(ansible_collections.their.collection.plugins.plugin_utils.engines.name).
"""

from __future__ import annotations

import importlib
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils.engines.base import Engine
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings
from ansible_collections.rankzero.inference.plugins.plugin_utils.values import nearest

BUILT_IN = ("llamacpp", "sglang", "sim", "vllm")
_HERE = "ansible_collections.rankzero.inference.plugins.plugin_utils.engines."


def load(name: str, findings: Findings) -> Engine | None:
    """The adapter of an engine, or None with a fault that says which engines there are."""
    if name in BUILT_IN:
        return _adapter(_HERE + name)
    if name.count(".") == 2:
        namespace, collection, engine = name.split(".")
        return _foreign("ansible_collections.%s.%s.plugins.plugin_utils.engines.%s" % (namespace, collection, engine), name, findings)
    close = nearest(name, BUILT_IN)
    findings.fault(
        "engine",
        name,
        "one of %s, or an engine of another collection as namespace.collection.engine" % ", ".join(BUILT_IN),
        "Did you mean %s?" % close if close else "",
    )
    return None


def _adapter(module: str) -> Engine:
    adapter = importlib.import_module(module).Adapter()
    if not isinstance(adapter, Engine):
        raise TypeError("%s.Adapter is not an Engine" % module)
    return adapter


def _foreign(module: str, name: str, findings: Findings) -> Engine | None:
    try:
        return _adapter(module)
    except ModuleNotFoundError as error:
        seen = "no module %s" % error.name
    except Exception as error:  # somebody else's code runs here: whatever it raises is told, not thrown at the operator
        seen = "%s: %s" % (type(error).__name__, error)
    findings.fault(
        "engine",
        "%s: %s" % (name, seen),
        "an installed collection with a class Adapter(Engine) in %s" % module,
        "Install the collection, or use one of %s." % ", ".join(BUILT_IN),
    )
    return None


__all__: t.Sequence[str] = ("BUILT_IN", "Engine", "load")
