"""What only GPUs can show. Skipped, by name, where there are fewer than two."""

import importlib.util
import json
import os
import re
import shutil
import signal

import pytest
import torch
from conftest import METRICS, ROOT, SCRIPTS, SMALL, command, edited, result, run, wait_until_gone
from test_apex import states

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
APEX = bool(importlib.util.find_spec("apex.amp")) if importlib.util.find_spec("apex") else False
needs_apex = pytest.mark.skipif(not APEX, reason="needs NVIDIA Apex, tag 25.04")
ON_GPU = [*SMALL, "--epochs", "1", "--device", "cuda"]
# Run after run the same numbers: no choice of algorithms by their speed.
EXACT = (
    "    torch.backends.cudnn.benchmark = True\n",
    "    torch.use_deterministic_algorithms(True, warn_only=True)\n",
)


def test_sync_bn_gives_all_processes_the_same_statistics(tmp_path):
    # Right after the last step, before anything is averaged.
    line = "        for buffer in filter(torch.is_floating_point, net.buffers()):\n"
    folder = edited(
        tmp_path / "edited",
        "ddp_launch_train",
        (line, "        print('SUM', sum(b.double().sum().item() for b in net.buffers()), force=True)\n" + line),
    )
    for flags, different in (["--sync-bn"], 1), ([], 2):
        finished = run(command("ddp_launch_train", *ON_GPU, *flags, "--precision", "fp32", folder=folder))
        assert result(finished)["gpus"] == 2
        assert len(set(re.findall(r"SUM (\S+)", finished.stdout))) == different


def visible():
    """Return the names of the GPUs that these tests may use."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")


def test_a_subset_of_the_gpus():
    found = result(run(command("ddp_spawn_train", *ON_GPU, nproc=1), CUDA_VISIBLE_DEVICES=visible()[-1]))
    assert found["gpus"] == 1 and found["backend"] == "nccl"


def test_data_parallel_computes_in_bf16(tmp_path):
    line = "    model = DataParallel(net) if gpus > 1 else net\n"
    say = "    net.conv1.register_forward_hook(lambda module, inputs, output: print(f'TYPE {output.dtype} ', end=''))\n"
    folder = edited(tmp_path / "edited", "dp_train", (line, line + say))
    finished = run(command("dp_train", *ON_GPU, "--precision", "bf16", folder=folder))
    assert result(finished)["gpus"] == torch.cuda.device_count() == len(result(finished)["peak_memory_mib"])
    assert set(re.findall(r"TYPE (\S+)", finished.stdout)) == {"torch.bfloat16"}


LONG = [*ON_GPU, "--limit", "600"]  # 50 steps: a CUDA graph takes over after 12, and the clock starts after 20


@pytest.mark.parametrize("eager", [[], ["--eager"]])
@pytest.mark.parametrize("name", ["one_gpu", "dp_train", "ddp_launch_train", "apex_amp_train"])
def test_the_step_loop_never_waits_for_the_gpu(name, eager, tmp_path):
    # PyTorch raises an error for every call that synchronises, from where the clock starts to the end of the loop.
    start, end = "            done += 1\n", "        if cuda:\n            torch.cuda.synchronize()\n"
    loud, quiet = "torch.cuda.set_sync_debug_mode('error')", "torch.cuda.set_sync_debug_mode('default')"
    changes = (start, f"{start}            done == warm + 2 and {loud}\n"), (end, f"        {quiet}\n{end}")
    script, env = ("dp_train", dict(CUDA_VISIBLE_DEVICES=visible()[0])) if name == "one_gpu" else (name, {})
    folder = edited(tmp_path / "edited", script, *changes)
    flags = ["--backend", "torch"] if script == "apex_amp_train" else []
    assert result(run(command(script, *LONG, *flags, *eager, folder=folder), **env))["steps"] == 50


@pytest.mark.parametrize("name", ["one_gpu", "dp_train", "ddp_launch_train", "ddp_spawn_train", "apex_amp_train"])
def test_a_graph_trains_like_python(name, tmp_path):
    script, env = ("dp_train", dict(CUDA_VISIBLE_DEVICES=visible()[0])) if name == "one_gpu" else (name, {})
    folder = edited(tmp_path / "edited", script, EXACT)
    flags = ["--backend", "torch"] if script == "apex_amp_train" else ["--precision", "fp32"]
    env |= dict(CUBLAS_WORKSPACE_CONFIG=":4096:8")
    losses = []
    for eager in [], ["--eager"]:
        finished = run(command(script, *LONG, "--epochs", "2", *flags, *eager, folder=folder), **env)
        result(finished)
        losses.append([float(loss) for loss in re.findall(r"step \d+/50 loss (\S+)", finished.stdout)])
    assert len(losses[0]) == 100 and losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_data_parallel_computes_what_torch_has_it_compute(tmp_path):
    losses = []
    original = " DataParallel(net) if", " nn.DataParallel(net) if"
    for name, flags, *changes in ("ours", []), ("torch", ["--eager"], original):
        folder = edited(tmp_path / name, "dp_train", EXACT, *changes)
        finished = run(command("dp_train", *LONG, *flags, "--precision", "fp32", folder=folder))
        assert result(finished)["gpus"] == torch.cuda.device_count()
        losses.append([float(loss) for loss in re.findall(r"loss (\S+)", finished.stdout)])
    assert losses[0][:12] == losses[1][:12]  # then a CUDA graph, which cannot be told apart but for rounding
    assert len(losses[0]) == 50 + 2 and losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("script", ["ddp_launch_train", "ddp_spawn_train"])
def test_a_process_that_hangs_beside_a_graph_ends_the_run(script, tmp_path):
    line = "            scheduler.step()\n"
    hang = "            if rank == 1 and step == 30: time.sleep(1000)\n"
    folder = edited(tmp_path / "edited", script, (line, line + hang))
    arguments = command(script, *LONG, "--timeout", "15", folder=folder)
    finished = run(arguments, timeout=120, real=True)
    assert finished.returncode not in (0, 2) and "step 29/50" in finished.stdout
    assert re.search("imed out|timeout", finished.stderr), finished.stderr
    assert re.search(r"\[1\] finished collective #\d+, but didn't join", finished.stderr), finished.stderr
    pids = finished.stdout.partition("process ids [")[2].partition("]")[0].split(", ")
    wait_until_gone(list(map(int, pids)))


@pytest.mark.parametrize("ranks", ["all", "1"])
@pytest.mark.parametrize("script", ["dp_train", "ddp_launch_train", "ddp_spawn_train", "apex_amp_train"])
def test_a_full_gpu_is_one_sentence(script, ranks, tmp_path):
    line = "    common.seed_everything(args.seed)\n"
    gpus = "own_gpus" if ranks == "all" else "own_gpus[1:]" if script == "dp_train" else "own_gpus * rank"
    little = f"    for gpu in {gpus}: torch.cuda.set_per_process_memory_fraction(0.004, gpu)\n"
    folder = edited(tmp_path / "edited", script, (line, line + little))
    flags = ["--limit", "1024", "--batch-size", "512", "--arch", "resnet50", "--image-size", "32"]
    finished = run(command(script, *ON_GPU, *flags, folder=folder), timeout=90)
    assert finished.returncode == 2 and "Traceback" not in finished.stderr, finished.stderr
    said = [line for line in finished.stderr.splitlines() if line.startswith(f"{script}.py: ")]
    assert len(said) == 1 and "out of memory" in said[0] and "give a smaller --batch-size" in said[0], finished.stderr


@pytest.mark.parametrize("script", ["dp_train", "ddp_launch_train", "ddp_spawn_train"])
def test_a_signal_ends_every_process_within_ten_seconds(script, start):
    running = start(command(script, *LONG, "--epochs", "1000"))
    pids = running.pids()
    running.wait_for("step 30/50")
    running.process.send_signal(signal.SIGTERM)
    running.process.wait(timeout=10)
    wait_until_gone(pids)  # and with a process its memory on the GPU


@pytest.mark.parametrize("how", ["dp_train", "ddp_launch_train", "ddp_spawn_train", "torchrun --max-restarts"])
def test_a_killed_process_ends_the_others_and_the_run_goes_on(how, tmp_path, start):
    script = how if how in SCRIPTS else "ddp_launch_train"
    folder = edited(tmp_path / "edited", script, EXACT)
    flags = [*LONG, "--epochs", "3", "--precision", "fp32", "--checkpoint"]
    env = dict(CUBLAS_WORKSPACE_CONFIG=":4096:8", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    unbroken = result(run(command(script, *flags, str(tmp_path / "unbroken.pt"), folder=folder), **env))
    arguments = command(script, *flags, str(tmp_path / "run.pt"), folder=folder)
    if script != how:
        arguments.insert(3, "--max-restarts=3")
    running = start(["env", *map("=".join, env.items()), *arguments])
    pids = running.pids()
    running.wait_for("epoch 2 step 30")
    os.kill(pids[-1], signal.SIGKILL)
    wait_until_gone(pids)
    assert (running.process.wait(timeout=90) == 0) == (script != how), running.log.read_text()
    if script == how:
        running = start(["env", *map("=".join, env.items()), *arguments])
        assert running.process.wait(timeout=90) == 0, running.log.read_text()
    log = running.log.read_text()
    assert "epochs      1 done, 2 to come of 50 steps" in log and log.count("RESULT ") == 1
    found = json.loads(re.search("^RESULT (.*)", log, re.M)[1])
    assert [found[key] for key in METRICS] == pytest.approx([unbroken[key] for key in METRICS], rel=1e-2)


def test_a_profile_shows_the_all_reduce(tmp_path):
    path = tmp_path / "trace.json"
    result(run(command("ddp_launch_train", *LONG, "--profile", str(path))))
    kernels = {event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "kernel"}
    assert any("nccl" in name and "AllReduce" in name for name in kernels)


def test_more_processes_than_gpus():
    count = torch.cuda.device_count() + 1
    finished = run(command("ddp_spawn_train", *ON_GPU, "--batch-size", str(count), nproc=count), cwd=ROOT)
    assert finished.returncode == 2 and "start one process per GPU" in finished.stderr


def amp_run(*flags, **kwargs):
    arguments = command("apex_amp_train", *ON_GPU, *flags, **kwargs)
    return run(arguments, CUBLAS_WORKSPACE_CONFIG=":4096:8")


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_torch_levels(level):
    found = result(amp_run("--backend", "torch", "--opt-level", level, "--epochs", "3"))
    assert (found["backend"], found["precision"], found["gpus"]) == ("torch", level, 2)
    assert found["train_loss"] < 2.5


@needs_apex
@pytest.mark.parametrize("ddp", ["torch", "apex"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_apex_levels(level, ddp):
    finished = amp_run("--opt-level", level, "--ddp", ddp, "--epochs", "3", "--clip-grad", "5")
    found = result(finished)
    assert (found["backend"], found["ddp"], found["precision"], found["gpus"]) == ("apex", ddp, level, 2)
    assert found["train_loss"] < 2.5
    assert not re.search("UserWarning|FutureWarning", finished.stderr), finished.stderr


@needs_apex
@pytest.mark.parametrize("level", ["O0", "O3"])
def test_apex_and_torch_compute_the_same(level, tmp_path):
    # Without loss scaling the two do the same operations.
    folder = edited(tmp_path / "edited", "apex_amp_train", EXACT)
    flags = ["--opt-level", level, "--epochs", "2"]
    apex, native = (result(amp_run("--backend", name, *flags, folder=folder)) for name in ("apex", "torch"))
    assert [apex[key] for key in METRICS] == [native[key] for key in METRICS]


@needs_apex
def test_apex_ddp_validates_with_the_same_network_on_all_processes(tmp_path):
    flags = ["--device", "cuda", "--backend", "apex", "--ddp", "apex", "--opt-level", "O1"]
    assert len(set(states("apex_amp_train", tmp_path / "edited", flags))) == 1


@needs_apex
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_first_step_that_overflows_under_apex_is_skipped(level, tmp_path):
    change = ("amp.backward(loss, opt", "amp.backward(loss * (float('inf') if done == 0 else 1), opt")
    folder = edited(tmp_path / "edited", "apex_amp_train", change)
    path = tmp_path / "run.pt"
    finished = amp_run("--backend", "apex", "--opt-level", level, "--checkpoint", str(path), folder=folder)
    losses = [float(loss) for loss in re.findall(r"step [1-5]/5 loss (\S+)", finished.stdout)]
    result(finished)
    saved = torch.load(path, weights_only=True)
    assert len(losses) == 5 and max(losses) < 10
    assert saved["amp"]["scale"]["loss_scaler0"]["loss_scale"] <= 2**15
    assert all(weight.isfinite().all() for weight in saved["model"].values())
    assert not re.search("UserWarning|FutureWarning", finished.stderr), finished.stderr


@pytest.mark.parametrize("kind", ["apex O1", "apex O2", "torch O1"])
def test_a_resumed_run_goes_on_where_it_was(kind, tmp_path):
    backend, level = kind.split()
    if backend == "apex" and not APEX:
        pytest.skip("needs NVIDIA Apex, tag 25.04")
    folder = edited(tmp_path / "edited", "apex_amp_train", EXACT)
    flags = ["--backend", backend, "--opt-level", level, "--epochs", "2", "--checkpoint"]
    a, b = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    # The unbroken run keeps a copy of its checkpoint after the first of its two epochs: the second run resumes from it.
    keep = "            save(state | dict(amp=amp.state_dict(optimizer)), path, temporary)\n"
    path = folder / "apex_amp_train.py"
    copy = "            save(torch.load(path), f'{path}.{epoch}', temporary)\n"
    path.write_text(path.read_text().replace(keep, keep + copy))
    unbroken = amp_run(*flags, a, folder=folder)
    result(unbroken)
    shutil.copy(f"{a}.1", b)
    resumed = amp_run(*flags, b, folder=folder)
    assert "epochs      1 done, 1 to come" in resumed.stdout
    assert [result(resumed)[key] for key in METRICS] == [result(unbroken)[key] for key in METRICS]
    after, before = (torch.load(path, weights_only=True) for path in (a, b))
    for key in after["model"]:  # cuDNN's BatchNorm in float16 may round the last bit otherwise
        torch.testing.assert_close(after["model"][key], before["model"][key], rtol=1e-3, atol=1e-5)
    if backend == "apex":
        assert after["amp"]["scale"] == before["amp"]["scale"]
        assert all(map(torch.equal, after["amp"]["masters"], before["amp"]["masters"]))
        assert {weight.dtype for weight in after["amp"]["masters"]} == {torch.float32}
