# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Install a pinned build of an engine below C(<root>/opt/rankzero/engines), beside others, whole or not at all.

Each build has a directory of its own, C(<engine>-<name>/<digest of what was asked for>), so a changed wish never touches the files that a running
replica was started from. The file C(COMPLETE) is written last: a directory without it is half an install, which nobody uses and the next run
removes. Programs are registered (C(engines.d)) only after that.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.rankzero.inference.plugins.module_utils import archives, downloads, engine_probe, models, small_files
from ansible_collections.rankzero.inference.plugins.module_utils.engine_probe import option

RunCommand = Callable[..., "tuple[int, str, str]"]
ROOT = "opt/rankzero/engines"
COMPLETE = "COMPLETE"
MOST_DEPTH = 6
# Of one package, or of a wheel that names its hash or lies on the host.
_PINNED = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._, -]+\])?\s*(==\s*[A-Za-z0-9][A-Za-z0-9.+!_-]*|@\s*https://[^\s#]+#sha256=[0-9a-f]{64}|@\s*file:///\S+)\Z"
)
CMAKE_ARGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_RPC=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",  # the programs are moved out of the build tree
)
_OURS = re.compile(r"(download-)?[0-9a-f]{12}(\.part(\.json)?)?\Z")
_ERROR = re.compile(r"^(ERROR|CMake Error|fatal)\b|\b(fatal )?error:")
CUDA_PATH = "/usr/local/cuda/bin"


class InstallError(Exception):
    """A build cannot be installed or removed. The text says what was seen, and what to do."""


def check(install: Mapping[str, Any]) -> None:
    """Raises InstallError for what would not be one certain build, or would be read as something else than it is."""
    method = install["method"]
    if method == "venv":
        if not install["requirements"]:
            raise InstallError("%s is empty: name the packages, such as vllm==0.33.0" % option("requirements"))
        for requirement in install["requirements"]:
            if not _PINNED.match(requirement):
                raise InstallError(
                    "%s has %r: a pinned one is wanted, such as vllm==0.33.0 or ray[cgraph]==2.60.0, "
                    "or NAME @ https://...whl#sha256=..., or NAME @ file:///path/of/a.whl" % (option("requirements"), requirement)
                )
            if downloads.secret_parts(requirement.partition("@")[2].strip().partition("#")[0]):
                raise InstallError(
                    "%s has an address of %s with a password or a query, which everybody on the host would see among pip's arguments: "
                    "name the package, and give the password in %s or %s"
                    % (option("requirements"), requirement.partition("@")[0].strip(), option("index_url"), option("extra_index_urls"))
                )
    if method in ("archive", "source"):
        if not install["archive"]:
            raise InstallError("%s is not set: give an http(s) address, or a path on the controller" % option("archive"))
        if not re.match(r"[0-9a-f]{64}\Z", install["sha256"] or ""):
            raise InstallError("%s is %r: the 64 lower-case hexadecimal digits of the archive are wanted" % (option("sha256"), install["sha256"]))
    if method == "image":
        _check_image(install)
    if method == "package" and not re.match(r"[A-Za-z0-9][A-Za-z0-9.+_-]*\Z", install["package"] or ""):
        raise InstallError("%s is %r: the name of a package of the distribution is wanted" % (option("package"), install["package"]))


def _check_image(install: Mapping[str, Any]) -> None:
    if bool(install["image"]) == bool(install["archive"]):
        raise InstallError(
            "%s and %s are %s set: name an image by its digest, or an archive of one"
            % (option("image"), option("archive"), "both" if install["image"] else "not")
        )
    if install["image"] and not re.match(r"[a-z0-9][A-Za-z0-9._:/-]*@sha256:[0-9a-f]{64}\Z", install["image"]):
        raise InstallError(
            "%s is %r: one with its digest is wanted, NAME@sha256:..., for a tag is another image tomorrow" % (option("image"), install["image"])
        )
    if install["archive"] and not re.match(r"[0-9a-f]{64}\Z", install["sha256"] or ""):
        raise InstallError("%s is %r: the 64 lower-case hexadecimal digits of the archive are wanted" % (option("sha256"), install["sha256"]))
    for path in install["mounts"]:
        if not os.path.isabs(path) or ":" in path or not path.isprintable() or os.path.normpath(path) in ("/", "/etc", "/run", "/var", "/proc", "/sys", "/dev"):
            raise InstallError("%s has %r: an absolute path of models, without :, is wanted" % (option("mounts"), path))


def digest(install: Mapping[str, Any]) -> str:
    """12 hex digits over everything that decides what is installed; credentials in an index's address are no part of it."""
    indexes = [downloads.shown(url) for url in [install["index_url"] or "", *install["extra_index_urls"]]]
    chosen = {key: install[key] for key in ("method", "requirements", "python", "sha256", "cmake_args", "cuda")}
    if install["method"] == "image":
        chosen.update({key: install[key] for key in ("image", "mounts", "podman_options")})
    return hashlib.sha256(json.dumps([chosen, indexes], sort_keys=True).encode()).hexdigest()[:12]


class Store:
    """The directories of one build's installs on a host. C(run_command): AnsibleModule's."""

    def __init__(self, root: str, engine: str, name: str, run_command: RunCommand) -> None:
        self.root = root
        self.engine, self.name = engine, name
        self.base = os.path.join(root, ROOT)
        self.directory = os.path.join(self.base, "%s-%s" % (engine, name))
        self.run_command = run_command

    def place(self, install: Mapping[str, Any]) -> str:
        return os.path.join(self.directory, digest(install))

    def is_complete(self, place: str) -> bool:
        return os.path.isfile(os.path.join(place, COMPLETE))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One run at a time installs on a host. The lock ends with its process, whatever becomes of that."""
        os.makedirs(self.base, 0o755, exist_ok=True)
        descriptor = os.open(self.base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InstallError("another run installs or removes a build below %s now: wait for it" % self.base) from None
        else:
            yield
        finally:
            os.close(descriptor)

    def install(self, install: Mapping[str, Any], programs: Sequence[str], transferred: str | None) -> None:
        """Make the build's directory. `transferred`: where the controller's archive was put. Half an install of an earlier run goes first."""
        place = self.place(install)
        previous = os.umask(0o022)  # the service's user reads it
        try:
            os.makedirs(self.directory, 0o755, exist_ok=True)
            self._remove(place)
            os.mkdir(place)
            try:
                getattr(self, "_" + install["method"])(install, place, programs, transferred)
            except BaseException:
                self._remove(place)
                raise
            with open(os.path.join(place, COMPLETE), "w", encoding="utf-8") as stream:
                json.dump({"engine": self.engine, "name": self.name, "method": install["method"]}, stream)
                stream.flush()
                os.fsync(stream.fileno())
        finally:
            os.umask(previous)

    def stale(self, keep: str | None) -> list[str]:
        """Directories of other installs under this name, half ones and downloads among them. What has none of our names is not ours."""
        ours = [name for name in small_files.names(self.directory) if _OURS.match(name)]
        return [path for path in (os.path.join(self.directory, name) for name in ours) if path != keep]

    def remove(self, places: Sequence[str]) -> None:
        for place in places:
            self._remove_image(place)
            self._remove(place)
        for directory in (self.directory, self.base):
            with contextlib.suppress(OSError):
                os.rmdir(directory)

    def _remove_image(self, place: str) -> None:
        """The image goes with the build that brought it, unless another build or a container uses it: podman refuses then."""
        settings = small_files.read_json(os.path.join(place, "bin/container.json"))[0] or {}
        if settings.get("brought") and isinstance(settings.get("image"), str) and not self._has_image(settings["image"], place):
            with contextlib.suppress(InstallError, OSError):
                self._told([str(settings["podman"]), "image", "rm", settings["image"]])

    def _has_image(self, image: str, but: str) -> bool:
        for build in small_files.names(self.base):
            for name in small_files.names(os.path.join(self.base, build)):
                place = os.path.join(self.base, build, name)
                if place != but and (small_files.read_json(os.path.join(place, "bin/container.json"))[0] or {}).get("image") == image:
                    return True
        return False

    def _remove(self, place: str) -> None:
        """The mark goes first: an interrupted removal leaves no directory that looks whole."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(os.path.join(place, COMPLETE))
        if os.path.isdir(place) and not os.path.islink(place):
            shutil.rmtree(place)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(place)

    # ---- the methods

    def _venv(self, install: Mapping[str, Any], place: str, programs: Sequence[str], _transferred: str | None) -> None:
        python = install["python"] or getattr(sys, "_base_executable", None) or sys.executable
        self._run([python, "-I", "-m", "venv", place], "On Debian and Ubuntu, install python3-venv; or set python to another interpreter.")
        command = [os.path.join(place, "bin/python"), "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
        more: dict[str, str] = {}
        if install["wheels"]:
            if not os.path.isdir(install["wheels"]):
                raise InstallError("%s is %s, and there is no such directory on the host" % (option("wheels"), install["wheels"]))
            command += ["--no-index", "--find-links", install["wheels"]]
            more["PIP_CONFIG_FILE"] = os.devnull
        if install["index_url"]:  # in the environment: it may hold a password, and everybody sees arguments
            more["PIP_INDEX_URL"] = install["index_url"]
        if install["extra_index_urls"]:
            more["PIP_EXTRA_INDEX_URL"] = " ".join(install["extra_index_urls"])
        self._run([*command, *install["requirements"]], "Correct requirements, or where they come from (index_url, extra_index_urls, wheels).", more)
        self._programs_below(place, programs, "bin")

    def _archive(self, install: Mapping[str, Any], place: str, programs: Sequence[str], transferred: str | None) -> None:
        self._unpack(install, place, transferred)
        find_directory(place, programs[0])

    def _source(self, install: Mapping[str, Any], place: str, programs: Sequence[str], transferred: str | None) -> None:
        """Built in the build's own directory, so that half a build goes the same way as half an install."""
        work = os.path.join(place, "work")
        os.mkdir(work)
        self._unpack(install, work, transferred)
        path = engine_probe.CLEAN_PATH + (":" + CUDA_PATH if os.path.isdir(CUDA_PATH) else "")
        needed = ["cmake", "c++", *(["nvcc"] if install["cuda"] else [])]
        missing = [program for program in needed if shutil.which(program, path=path) is None]
        if missing:
            raise InstallError("no %s on the host: install the build tools%s" % (", ".join(missing), " and the CUDA toolkit" if "nvcc" in missing else ""))
        source = os.path.dirname(_one(_walk(work, {"CMakeLists.txt"}, shallowest=True), "a CMakeLists.txt", work))
        build = os.path.join(work, "build")
        args = [*CMAKE_ARGS, "-DGGML_CUDA=%s" % ("ON" if install["cuda"] else "OFF"), *install["cmake_args"]]
        self._run(["cmake", "-S", source, "-B", build, *args], "Correct cmake_args, or install what it misses.", {"PATH": path})
        self._run(["cmake", "--build", build, "--parallel", str(os.cpu_count() or 1)], "The compiler needs what it names, or other sources.", {"PATH": path})
        shutil.copytree(find_directory(build, programs[0]), os.path.join(place, "bin"), symlinks=True)
        shutil.rmtree(work)

    def _image(self, install: Mapping[str, Any], place: str, programs: Sequence[str], transferred: str | None) -> None:
        """Bring the image, and put a program that starts a container of it in the place of each of the engine's."""
        podman = shutil.which("podman", path=engine_probe.CLEAN_PATH)
        if podman is None:
            raise InstallError("no podman on the host: install it, and nvidia-container-toolkit for its GPUs (nvidia-ctk cdi generate)")
        before = set(self._told([podman, "images", "--no-trunc", "--quiet"]).split())
        if install["image"]:
            self._run([podman, "pull", "--quiet", install["image"]], "Correct image, or log in to its registry (podman login).")
            reference = install["image"]
        else:
            reference = self._load(podman, install, transferred)
        image = self._told([podman, "image", "inspect", "--format", "{{.Id}}", reference]).strip()
        folder = os.path.join(place, "bin")
        os.mkdir(folder)
        settings = {
            "podman": podman,
            "image": image,
            "mounts": [os.path.normpath(path) for path in install["mounts"]],
            "options": install["podman_options"],
            "programs": {"python": "python3"},
            "brought": "sha256:" + image.replace("sha256:", "") not in before,
        }
        with open(os.path.join(folder, "container.json"), "w", encoding="utf-8") as stream:
            json.dump(settings, stream, indent=1, sort_keys=True)
        for name in [*programs, "python"]:
            with open(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755), "w", encoding="utf-8") as program:
                program.write("#!%s -I\n%s" % (sys.executable, install["wrapper"]))

    def _checked_archive(self, install: Mapping[str, Any], transferred: str | None) -> str:
        """The path of the archive, transferred from the controller or downloaded, with the checksum that is wanted."""
        path = transferred
        if path is None:
            path = os.path.join(self.directory, "download-" + install["sha256"][:12])
            downloads.fetch(install["archive"], path, install["sha256"])
        seen = models.sha256(path)
        if seen != install["sha256"]:
            raise InstallError("%s has sha256 %s, and %s is wanted" % (downloads.shown(install["archive"]), seen, install["sha256"]))
        return path

    def _load(self, podman: str, install: Mapping[str, Any], transferred: str | None) -> str:
        path = self._checked_archive(install, transferred)
        told = self._told([podman, "load", "--quiet", "--input", path])
        names = re.findall(r"Loaded image(?:\(s\))?:\s*(\S+)", told)
        if transferred is None:
            os.unlink(path)
        return _one([name.rstrip(",") for name in names], "an image", ".")

    def _told(self, words: Sequence[str]) -> str:
        rc, out, err = self.run_command(list(words), cwd="/", expand_user_and_vars=False, environ_update={"LC_ALL": "C.UTF-8"})
        if rc != 0:
            raise InstallError("%s ended with %d: %s" % (" ".join(words[:3]), rc, (err or out).strip()[-500:] or "no output"))
        return out

    def _unpack(self, install: Mapping[str, Any], place: str, transferred: str | None) -> None:
        path = self._checked_archive(install, transferred)
        archives.unpack(path, place)
        if transferred is None:
            os.unlink(path)

    def _programs_below(self, place: str, programs: Sequence[str], folder: str) -> None:
        missing = [name for name in programs if not os.access(os.path.join(place, folder, name), os.X_OK)]
        if missing:
            raise InstallError("what was installed has no program %s: name its package too" % ", ".join(missing))

    def _run(self, words: Sequence[str], hint: str, more: Mapping[str, str] | None = None) -> None:
        """In the environment of the caller, for proxies and certificates are in it; less what would lead Python, pip or the loader elsewhere."""
        dropped = [name for name in os.environ if re.match(r"(PYTHON|PIP_|LD_|VIRTUAL_ENV|CONDA_|BASH_)", name)]
        command = ["env", *(word for name in dropped for word in ("-u", name)), *words]
        rc, out, err = self.run_command(command, environ_update={"LC_ALL": "C.UTF-8", **(more or {})}, cwd="/", expand_user_and_vars=False)
        if rc != 0:
            told = [line.strip() for line in (err + "\n" + out).splitlines() if line.strip()]
            errors = [line for line in told if _ERROR.search(line)] or told[-3:] or ["no output"]
            raise InstallError("%s ended with %d: %s. %s" % (" ".join(words[:5]), rc, hide(" / ".join(errors[:5])[:1000], more or {}), hint))


def hide(text: str, environment: Mapping[str, str]) -> str:
    """A program's words without the addresses that it was given in secret; pip masks passwords itself, and user names not."""
    for value in environment.values():
        for word in value.split():
            if "://" in word:
                text = text.replace(word, downloads.shown(word))
                text = re.sub(re.escape(word.split("://", 1)[1].rpartition("@")[0] or "\0") + "@", "", text)
    return text


# ---- programs


def find_directory(place: str, program: str) -> str:
    """The one directory of an unpacked archive that holds the engine's program. Raises InstallError where there is none, or more than one."""
    found = [path for path in _walk(place, {program}) if os.access(path, os.X_OK) and os.path.isfile(path)]
    return os.path.dirname(_one(found, "an executable %s" % program, place))


def _walk(place: str, names: set[str], shallowest: bool = False) -> list[str]:
    found = []
    for folder, folders, files in os.walk(place):
        folders.sort()
        if folder[len(place) :].count(os.sep) >= MOST_DEPTH:
            folders.clear()
        found += [os.path.join(folder, name) for name in sorted(files) if name in names]
        if found and shallowest:
            break
    return found


def _one(found: Sequence[str], what: str, place: str) -> str:
    if len(found) != 1:
        listed = ", ".join(os.path.relpath(path, place) for path in found[:5])
        raise InstallError("the archive has %s%s" % ("no %s" % what.partition(" ")[2] if not found else "%s more than once: " % what, listed))
    return found[0]


# ---- packages of the distribution


def package_version(run_command: RunCommand, name: str) -> str | None:
    """The version of an installed package by dpkg or rpm; None where it is not installed."""
    for words in (["dpkg-query", "-W", "-f=${db:Status-Status} ${Version}", name], ["rpm", "-q", "--qf", "installed %{VERSION}-%{RELEASE}", name]):
        try:
            rc, out, _err = run_command(words, handle_exceptions=False, environ_update={"LC_ALL": "C"})
        except OSError:
            continue
        if rc == 0 and out.startswith("installed "):
            return out.partition(" ")[2].strip()
    return None


def container_of(program: str) -> dict[str, Any] | None:
    """C({image, mounts}) of a program that starts a container; None for any other."""
    settings = small_files.read_json(os.path.join(os.path.dirname(program), "container.json"))[0]
    return None if settings is None else {"image": str(settings.get("image")), "mounts": [str(path) for path in settings.get("mounts") or ()]}


# ---- who uses a build


def users(root: str, engine: str, name: str, place: str | None = None) -> list[str]:
    """The replicas on this host that a build cannot be taken from, as C(NAME) or C(NAME (kept for a rollback)), by name.

    With `place` those count that start programs below that directory; without it, those that were planned with the build's name.
    """
    found = []
    base = os.path.join(root, "etc/rankzero")
    for replica in small_files.names(base):
        revisions = os.path.join(base, replica, "revisions")
        current = os.path.realpath(os.path.join(base, replica, "current"))
        using = [
            revision
            for revision in small_files.names(revisions)
            if _uses(small_files.read_json(os.path.join(revisions, revision, "launch.json"), 4 << 20)[0] or {}, engine, name, place)
        ]
        if using:
            runs = any(os.path.realpath(os.path.join(revisions, revision)) == current for revision in using)
            found.append(replica if runs else "%s (kept for a rollback)" % replica)
    return found


def _uses(launch: Mapping[str, Any], engine: str, name: str, place: str | None) -> bool:
    launches = launch.get("launches") if isinstance(launch.get("launches"), list) else []
    if place is not None:
        return any(str(one.get("path", "")).startswith(place.rstrip("/") + "/") for one in launches or [] if isinstance(one, dict))
    labels, build = launch.get("labels"), launch.get("build")
    own = isinstance(labels, dict) and str(labels.get("engine") or engine).rpartition(".")[2] == engine.rpartition(".")[2]
    return own and isinstance(build, dict) and build.get("name") == name


__all__ = ["COMPLETE", "InstallError", "Store", "check", "container_of", "digest", "find_directory", "package_version", "users"]
