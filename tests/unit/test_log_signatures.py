# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real log lines, from the named reports and from runs of the engines on a CPU, and what they must be understood as."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.rankzero.inference.plugins.module_utils import log_signatures

REAL_LINES = [
    # vllm#20305, with and without the device (pytorch#175666)
    ("ValueError: Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory utilization (0.95, 45.01 GiB).", "already"),
    ("ValueError: Free memory on device cuda:0 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization (0.9, 19.84 GiB)", "already holds"),
    ("ValueError: Available memory on node 0 (21.63/23.54 GiB) on startup is less than desired CPU memory utilization (0.92).", "less free"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of 79.10 GiB", "ran out of memory"),
    ("ggml_backend_cuda_buffer_type_alloc_buffer: allocating 8148.38 MiB on device 0: cudaMalloc failed: out of memory", "ran out of memory"),
    ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "too little memory is left"),
    ("ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.", "much less free memory"),
    # llama.cpp#13059, #17542, #22748, ollama#5573
    ("ggml_cuda_init: failed to initialize CUDA: system not yet initialized", "fabric"),
    ("ggml_cuda_init: failed to initialize CUDA: system has unsupported display driver / cuda driver combination", "different versions"),
    ("ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected", "sees no GPU"),
    ("warning: no usable GPU found, --gpu-layers option will be ignored", "goes on with the CPU"),
    ("error: invalid device: CUDA0", "does not have the device"),
    ("RuntimeError: Failed to infer device type", "sees no accelerator"),
    # ranks that do not meet: sglang#3820, nccl-tests#162, NVIDIA/nccl#1837, aws-do-eks#50, and runs in two network namespaces
    ("node5:240:240 [6] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No route to host) errno 115", "over TCP"),
    ("ubuntu:39964:4 [0] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to 10.0.0.2<45763> failed : Software caused connection abort", "over TCP"),
    ("ncclSocketInit: connecting to address  with family 59936 is neither AF_INET(2) nor AF_INET6(10)", "NCCL_SOCKET_IFNAME"),
    ("RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/pair.cc:1] no error: Connection refused, remote=[127.0.1.1]:41267", "loopback"),
    ("RuntimeError: [enforce fail at gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth9", "does not have"),
    ("torch.distributed.DistStoreError: Timed out after 41 seconds waiting for clients. 1/2 clients joined.", "not every rank joined"),
    ("torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of (10.77.6.9, 29501).", "rendezvous port"),
    # nccl-tests#227, NVIDIA/nccl#2013, nccl-tests#206
    ("ibvwrap.c:160 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out", "cannot reach each other"),
    ("ibvwrap.c:262 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx_x:1, curr state INIT, next state RTR", "cannot reach"),
    ("misc/ibvwrap.cc:252 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory", "pin memory"),
    ("NCCL WARN Error while creating shared memory segment /dev/shm/nccl-Rk1bdr (size 9637888)", "/dev/shm"),
    # the program itself
    ("[Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use", "uses a port"),
    ("main: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18097", "uses a port"),
    ("llama-server: error while loading shared libraries: libllama-common.so.0: cannot open shared object file: No such file or directory", "shared library"),
    ("importlib.metadata.PackageNotFoundError: No package metadata was found for vllm", "lacks a package"),
    ("error: invalid argument: --no-mmap", "does not accept"),
    ("OSError: [Errno 24] Too many open files: '/models/glm/model-00001-of-00004.safetensors'", "enough files"),
    ("torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')", "compiler"),
    ("RuntimeError: Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl.", "compiler"),
    ("/tmp/tmpx/main.c:5:10: fatal error: Python.h: No such file or directory", "compiler"),
    ("Illegal instruction (core dumped)", "another CPU"),
    ("llama_model_load: error loading model: tensor 'blk.0.attn_k.weight' data is not within the file bounds, model is corrupted or incomplete", "damaged"),
    ("error: failed to load model, '/models/glm': No such file or directory", "not at the path"),
    ("OSError: /models/x does not appear to have a file named config.json.", "not at the path"),
    ("ValueError: The quantization method fp8 is not supported for the current GPU. Minimum capability: 89. Current capability: 80.", "newer GPU"),
    ("ValueError: Total number of attention heads (4) must be divisible by tensor parallel size (3).", "does not divide"),
    ("PermissionError: [Errno 13] Permission denied: '/models/glm/config.json'", "may not read"),
    ("ValueError: Failed to load the model config. If the model is a custom model, consider setting `trust_remote_code=True` in LLM.", "its own code"),
    ("RuntimeError: Version mismatch: The cluster was started with:", "another version"),
]

HEALTHY_LINES = [
    "[2026-11-29 18:49:18] server_args={'model_path': '/models/tiny', 'tokenizer_mode': 'auto', 'trust_remote_code': False, 'context_length': None}",
    "(APIServer pid=116) INFO 11-29 18:10:49 [api_utils.py:286] non-default args: {'model_tag': '/models/tiny', 'host': '10.77.0.11', 'enforce_eager': True}",
    "(EngineCore pid=314) INFO 11-29 18:12:46 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='/models/tiny', tokenizer_mode=auto, "
    "trust_remote_code=False, dtype=torch.bfloat16, max_seq_len=256",
    "(APIServer pid=180) WARNING 11-29 18:24:39 [system_utils.py:255] Found ulimit of 20000 and failed to automatically increase with error current limit "
    "exceeds maximum limit. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n",
    "(Worker pid=14712) WARNING 11-29 17:42:53 [cpu_worker.py:114] libtcmalloc is not found in LD_PRELOAD. For best performance, set it.",
    "INFO 11-29 10:00:00 [api_server.py:1] Started server process [7]",
    "NCCL INFO NET/IB : No device found.",
    "node:1:1 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]",
    "main: server is listening on http://127.0.0.1:8080",
    "srv  log_server_r: request: GET /health 127.0.0.1 200",
    "Loading safetensors checkpoint shards: 100% Completed | 4/4",
    "run_shard: glm rank 0 of 2, fingerprint 0011223344556677, run 9f2c11d0a4be",
]


@pytest.mark.parametrize(("line", "part"), REAL_LINES)
def test_real_lines_are_understood(line: str, part: str) -> None:
    found = log_signatures.first_telling([*HEALTHY_LINES, line, "the end"])
    assert found is not None
    assert found["line"] == line
    assert part in found["cause"]
    assert found["hint"]


def test_healthy_lines_tell_nothing() -> None:
    assert log_signatures.first_telling(HEALTHY_LINES) is None
    assert log_signatures.telling(HEALTHY_LINES) == []


@pytest.mark.parametrize("signature", log_signatures.SIGNATURES, ids=lambda signature: signature.pattern.pattern[:30])
def test_every_signature_is_a_sentence(signature: log_signatures.Signature) -> None:
    for text in (signature.cause, signature.hint):
        assert text[0].isupper() or text.startswith(("df", "nvidia", "ss", "systemctl", "dmesg", "VLLM", "GLOO")), text
        assert text.endswith(".")


def test_earliest_line_counts_not_the_last_traceback() -> None:
    lines = [
        "(EngineCore pid=7) ERROR [multiproc_executor.py:492] ValueError: Free memory on device (0.49/79.32 GiB) on startup is less than desired GPU memory "
        "utilization (0.6, 47.59 GiB).",
        "Traceback (most recent call last):",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "torch.OutOfMemoryError: CUDA out of memory.",
    ]
    assert "already holds" in log_signatures.first_telling(lines)["cause"]


def test_retries_count_only_when_nothing_else_tells() -> None:
    retry = "TCP client failed to connect/validate to host 10.77.6.9:29501 - retrying (try=3, timeout=1800000ms)"
    assert log_signatures.first_telling([retry])["line"] == retry
    assert "out of memory" in log_signatures.first_telling([retry, "CUDA out of memory"])["cause"]


def test_unknown_error_of_a_program_is_shown_without_a_cause() -> None:
    lines = [
        "Traceback (most recent call last):",
        "my.package.StrangeError: the frobnicator is loose",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore died",
    ]
    assert log_signatures.first_telling(lines) == {"line": lines[1], "cause": None, "hint": None}
    assert log_signatures.first_telling(lines[2:]) is None
    assert log_signatures.first_telling(lines, own_errors=False) is None


def test_only_gpu_lines_count_for_a_program_that_goes_on() -> None:
    lines = ["PermissionError: [Errno 13] Permission denied: '/root/.cache'", "warning: no usable GPU found, --gpu-layers option will be ignored"]
    found = log_signatures.first_telling(lines, log_signatures.GPU_SIGNATURES, own_errors=False)
    assert found["line"] == lines[1]


@pytest.mark.parametrize(
    ("code", "signal", "part"),
    [
        (None, "SIGILL", "another CPU"),
        (132, None, "another CPU"),
        (-4, None, "another CPU"),
        (137, None, "SIGKILL"),
        (134, None, "SIGABRT"),
        (0, None, "exit code 0"),
        (127, None, "not found"),
        (None, "SIGXCPU", "SIGXCPU"),
    ],
)
def test_ends(code: int | None, signal: str | None, part: str) -> None:
    assert part in log_signatures.cause_of_end(code, signal)["cause"]


def test_an_ordinary_exit_code_tells_nothing() -> None:
    assert log_signatures.cause_of_end(1, None) is None
    assert log_signatures.cause_of_end(None, None) is None


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\x00b\x07c", "a b c"),
        ("\x1b]0;title\x07text", "text"),
        ("safe\u202eevil", "safe evil"),
        ("x\u2028y", "x y"),
        ("key=hunter22!", "key=********!"),
    ],
)
def test_cleaning(raw: str, shown: str) -> None:
    assert log_signatures.clean(raw, ["hunter22"]) == shown


def test_long_lines_are_cut_after_masking() -> None:
    line = log_signatures.clean("x" * 395 + "hunter22", ["hunter22"])
    assert len(line) <= log_signatures.LINE_LIMIT
    assert "hunter" not in line


def test_short_secrets_do_not_destroy_the_line() -> None:
    assert log_signatures.clean("port 8000", ["8", "000"]) == "port 8000"


def test_masking_reaches_every_depth_and_takes_the_longest_first() -> None:
    value = {"a": ["token-1234 and token-1234-5678", 7, None], "b": {"c": "x"}}
    assert log_signatures.mask(value, ["token-1234", "token-1234-5678"]) == {"a": ["******** and ********", 7, None], "b": {"c": "x"}}


@given(st.text(max_size=1200))
def test_cleaned_text_is_one_safe_line(text: str) -> None:
    line = log_signatures.clean(text)
    assert len(line) <= log_signatures.LINE_LIMIT
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in line)


WORDS = st.text(alphabet="abcdef-", max_size=40)


@given(st.text(alphabet="abcdef-", min_size=log_signatures.SHORTEST_SECRET, max_size=30), WORDS, WORDS)
def test_secrets_never_survive(secret: str, before: str, after: str) -> None:
    assert secret not in log_signatures.clean(before + secret + after, [secret])


def test_the_supervisors_own_normal_lines_are_no_cause() -> None:
    """Waiting for a rank that is not up yet is normal; what the engine says about its model is not."""
    lines = [
        "run_shard: launch llama-server waits for rank 1 at 127.0.0.2:29500 since 2026-11-29T15:02:43Z (Connection refused)",
        "0.00.1 E llama_model_load: error loading model: tensor 'x' data is not within the file bounds",
        "srv load_model: failed to load model '/models/broken.gguf'",
    ]
    assert "damaged" in log_signatures.first_telling(lines)["cause"]
    assert log_signatures.first_telling(lines[:1]) is None
    assert "could not load" in log_signatures.first_telling([lines[0], lines[2]])["cause"]
