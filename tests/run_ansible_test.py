# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run ansible-test on the committed tree, from a checkout at any path and with a package index as the only network.

    tests/run_ansible_test.py sanity [ARGUMENT...]      make sanity
    tests/run_ansible_test.py units [ARGUMENT...]       make units

ansible-test wants the tree at .../ansible_collections/NAMESPACE/NAME and in git, and prepares its environments with a pip bootstrap that it downloads from a
host that is no package index. So the committed tree is laid out in a temporary directory, and a stand-in for the bootstrap is put where ansible-test keeps the
downloaded one: it installs the wanted pip by way of ensurepip. `.collections`, which only makes checkouts importable, is left out.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile

import ansible_test
import matrix

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE = pathlib.Path.home() / ".ansible/test/cache"
BOOTSTRAP = """import subprocess, sys
# ensurepip in a process of its own: it switches pip's configuration off in its environment.
subprocess.check_call([sys.executable, "-m", "ensurepip"], stdout=subprocess.DEVNULL)
wanted = [word for word in sys.argv[1:] if not word.startswith("-")]
subprocess.check_call([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted])
"""


def lay_bootstrap() -> None:
    """One file for each pip version that this ansible-test may ask for; a file that is there already is left alone."""
    source = pathlib.Path(ansible_test.__path__[0], "_internal/python_requirements.py").read_text(encoding="utf-8")
    CACHE.mkdir(parents=True, exist_ok=True)
    for version in set(re.findall(r"pip\W+([0-9]{2}\.[0-9]+(?:\.[0-9]+)?)\b", source)):
        path = CACHE / f"get_pip_{version.replace('.', '_')}.py"
        if not path.exists():
            path.write_text(BOOTSTRAP, encoding="utf-8")


def lay_tree(directory: pathlib.Path) -> pathlib.Path:
    tree = directory / "ansible_collections/rankzero/inference"
    tree.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x", "--exclude=.collections", "-C", str(tree)], input=archive, check=True)
    identity = ["-c", "user.name=ansible-test", "-c", "user.email=ansible-test@example.invalid"]
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "the tree"]):
        subprocess.run(["git", *words], cwd=tree, check=True)
    return tree


def main() -> int:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    what, arguments = sys.argv[1], sys.argv[2:]
    lay_bootstrap()
    with tempfile.TemporaryDirectory(prefix="rankzero-ansible-test-") as directory:
        tree = lay_tree(pathlib.Path(directory))
        version = "{}.{}".format(*sys.version_info[:2])
        code = run(tree, [what, "--venv", "--python", version, *arguments])
        if what == "sanity" and not arguments:
            code = max([code, *(under(tree, other) for other in matrix.HOSTS if other != version)])
        return code


def run(tree: pathlib.Path, words: list[str], path: str = "") -> int:
    program = str(pathlib.Path(sys.executable).parent / "ansible-test")
    environment = {**os.environ, "PATH": path + os.pathsep + os.environ["PATH"]}
    return subprocess.run([program, *words, "--color", "no"], cwd=tree, env=environment, check=False).returncode


def under(tree: pathlib.Path, version: str) -> int:
    """Compile and import the modules under another Python that hosts have, if it is found here."""
    try:
        python = matrix.interpreter(version)
    except matrix.Skipped as reason:
        print(f"Not compiled and imported under Python {version}: {reason}", flush=True)
        return 0
    return run(tree, ["sanity", "--local", "--python", version, "--test", "compile", "--test", "import"], str(pathlib.Path(python).parent))


if __name__ == "__main__":
    sys.exit(main())
