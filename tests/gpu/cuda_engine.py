# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The smallest thing that is an inference engine on a GPU: it takes memory through the driver's own library and serves OpenAI's paths.

    cuda_engine.py serve --port P --host H --model NAME [--mib N] [--no-cuda] [--visible UUID,...]
    cuda_engine.py devices

Takes N MiB on each GPU that CUDA_VISIBLE_DEVICES names, through libcuda.so.1 with ctypes: no CUDA toolkit, no framework. With --no-cuda it serves
all the same, from the CPU, as engines do whose GPU backend does not load. With --visible it overrides what it was told, as a careless wrapper does.
"""

from __future__ import annotations

import argparse
import ctypes
import http.server
import json
import os
import sys


class CudaError(Exception):
    """A call of libcuda failed; the text names it and the driver's error."""


class Cuda:
    """libcuda.so.1. Only calls whose names and signatures are the same in every driver since CUDA 7."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", ctypes.c_uint(0))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown').decode()} ({code})")

    def devices(self) -> list[tuple[int, str]]:
        """(handle, name) of each GPU that CUDA_VISIBLE_DEVICES lets the driver show."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        found = []
        for number in range(count.value):
            device, name = ctypes.c_int(), ctypes.create_string_buffer(96)
            self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
            self._call("cuDeviceGetName", name, ctypes.c_int(len(name)), device)
            found.append((device.value, name.value.decode()))
        return found

    def take(self, device: int, mib: int) -> None:
        """Allocate and write memory on a GPU; it stays until the process ends."""
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(mib << 20))
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(1), ctypes.c_size_t(mib << 20))


class Handler(http.server.BaseHTTPRequestHandler):
    model = ""

    def answer(self, content: object) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self.answer({"object": "list", "data": [{"id": self.model, "object": "model"}]} if self.path == "/v1/models" else {"status": "ok"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answer(
            {
                "object": "chat.completion",
                "model": self.model,
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
                "choices": [{"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "x"}}],
            }
        )

    def log_message(self, format: str, *arguments: object) -> None:
        print(format % arguments, flush=True)


def serve(options: argparse.Namespace) -> None:
    if options.visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.visible
    if options.no_cuda:
        print("warning: no usable GPU found, continuing on the CPU", flush=True)
    else:
        cuda = Cuda()
        devices = cuda.devices()
        if not devices:
            raise CudaError("CUDA_VISIBLE_DEVICES leaves no GPU")
        for device, name in devices:
            cuda.take(device, options.mib)
            print(f"took {options.mib} MiB on device {device}: {name}", flush=True)
    Handler.model = options.model
    http.server.ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()


def main() -> int:
    parser = argparse.ArgumentParser(description="An engine that takes GPU memory and serves.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("devices")
    server = commands.add_parser("serve")
    server.add_argument("--host", required=True)
    server.add_argument("--port", type=int, required=True)
    server.add_argument("--model", required=True)
    server.add_argument("--mib", type=int, default=2048)
    server.add_argument("--no-cuda", action="store_true")
    server.add_argument("--visible")
    options = parser.parse_args()
    try:
        if options.command == "serve":
            serve(options)
        for device, name in Cuda().devices():
            print(f"{device}: {name}")
    except (CudaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
