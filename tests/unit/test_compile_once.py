# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Modules in an archive are compiled once where compile_once was imported before them. Without it they are compiled twice: should that ever change in
Python, the file can go."""

from __future__ import annotations

import json
import pathlib
import py_compile
import re
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPILE_ONCE = ROOT / "plugins/module_utils/compile_once.py"
COUNT = """
import json, runpy, sys
archive, before = sys.argv[1:]
seen = {}
def count(event, arguments):
    name = str(arguments[1]) if event == "compile" else ""
    if name.startswith(archive):
        seen[name[len(archive) + 1:]] = seen.get(name[len(archive) + 1:], 0) + 1
if before:
    runpy.run_path(before)
sys.addaudithook(count)
sys.path.insert(0, archive)
import outer.inner.leaf, outer.other
assert outer.inner.leaf.VALUE == 7 and outer.inner.leaf.__file__ == archive + "/outer/inner/leaf.py" and outer.inner.__path__
import importlib; importlib.reload(outer.other)
print(json.dumps(seen))
"""


def counted(tmp_path: pathlib.Path, before: str) -> dict[str, int]:
    archive = tmp_path / "payload.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        for name in ("outer/__init__.py", "outer/inner/__init__.py", "outer/other.py"):
            stream.writestr(name, "")
        stream.writestr("outer/inner/leaf.py", "from outer import other\nVALUE = 7\n")
    done = subprocess.run([sys.executable, "-I", "-c", COUNT, str(archive), before], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.skipif(sys.version_info < (3, 10), reason="Python 3.9 imports from archives in another way")
def test_each_file_is_compiled_once(tmp_path: pathlib.Path) -> None:
    plain, once = counted(tmp_path, ""), counted(tmp_path, str(COMPILE_ONCE))
    assert once == {"outer/__init__.py": 1, "outer/inner/__init__.py": 1, "outer/inner/leaf.py": 1, "outer/other.py": 2}, "that one is imported anew"
    assert sum(plain.values()) == 2 * sum(once.values()), plain


PRECOMPILED = """
import runpy, sys
archive, once = sys.argv[1:]
runpy.run_path(once)
sys.path.insert(0, archive)
import outer.leaf
assert outer.__file__ == archive + "/outer/__init__.pyc" and outer.leaf.__file__ == archive + "/outer/leaf.pyc", (outer.__file__, outer.leaf.__file__)
"""


def test_code_that_is_in_an_archive_compiled_is_where_it_is(tmp_path: pathlib.Path) -> None:
    """As in a zipped standard library or an egg: there the code names the source that it was once built from."""
    archive, source, compiled = tmp_path / "lib.zip", tmp_path / "source.py", tmp_path / "compiled.pyc"
    source.write_text("VALUE = 7\n")
    py_compile.compile(str(source), cfile=str(compiled), dfile="/build/elsewhere/source.py")
    with zipfile.ZipFile(archive, "w") as stream:
        for name in ("outer/__init__.pyc", "outer/leaf.pyc"):
            stream.write(compiled, name)
    done = subprocess.run([sys.executable, "-I", "-c", PRECOMPILED, str(archive), str(COMPILE_ONCE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


MODULES = sorted(path.name for path in (ROOT / "plugins/modules").glob("*.py") if "AnsibleModule(" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", MODULES)
def test_every_module_that_runs_on_hosts_imports_it_before_what_costs(name: str) -> None:
    imports = re.findall(r"^from (ansible[\w.]*) import (\w+)", (ROOT / "plugins/modules" / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert imports[0] == ("ansible_collections.rankzero.inference.plugins.module_utils", "compile_once")
