# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Importing this first makes the import of everything behind it cheaper by half, where modules come from an archive of source, as Ansible's do.

zipimport asks an archive for a module's file name by compiling the module, throws the result away, and compiles it again to run it (CPython's
Lib/zipimport.py: C(get_filename) and C(get_code) both go through C(_get_module_code)). Here the first result is kept for the second question. Only
public methods are used, and only in the process of this one call of a module.
"""

from __future__ import annotations

import os
import types
import zipimport

_get_code, _get_filename = zipimport.zipimporter.get_code, zipimport.zipimporter.get_filename
_compiled: dict[tuple[str, str, str], types.CodeType] = {}


def _key(importer: zipimport.zipimporter, name: str) -> tuple[str, str, str]:
    return importer.archive, importer.prefix, name


def get_filename(importer: zipimport.zipimporter, fullname: str) -> str:
    """Where the module is in the archive. Code that came there compiled (zipped standard libraries, eggs) has the name that its source once had. Raises
    ZipImportError."""
    code = _get_code(importer, fullname)
    if not code.co_filename.startswith(importer.archive + os.sep):
        return _get_filename(importer, fullname)
    _compiled[_key(importer, fullname)] = code
    return code.co_filename


def get_code(importer: zipimport.zipimporter, fullname: str) -> types.CodeType:
    return _compiled.pop(_key(importer, fullname), None) or _get_code(importer, fullname)


for method in (get_filename, get_code):
    setattr(zipimport.zipimporter, method.__name__, method)
