"""What only GPUs can show. Skipped, by name, if there are fewer than two."""

import importlib.util
import os
import re
import shutil
import signal

import pytest
import torch
from conftest import METRICS, SCRIPTS, SMALL, command, edited, process_ids, result, run, wait_until_gone

if torch.cuda.device_count() > 2:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"  # two are enough, and the batches of 12 images are for them
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
APEX = bool(importlib.util.find_spec("apex.amp")) if importlib.util.find_spec("apex") else False
needs_apex = pytest.mark.skipif(not APEX, reason="needs NVIDIA Apex, tag 25.04")
ON_GPU = [*SMALL, "--epochs", "1", "--device", "cuda"]
DETERMINISTIC = ("\n    train_set,", "\n    torch.backends.cudnn.deterministic = True\n    train_set,")
STEP = "        scheduler.step()\n"


def losses(finished):
    result(finished)
    return [float(loss) for loss in re.findall(r"step \d+/\d+ loss (?:of rank 0: )?(\S+)", finished.stdout)]


@pytest.mark.parametrize(("flags", "different"), [(["--sync-bn"], 1), ([], 2)])
def test_sync_bn_gives_all_processes_the_same_statistics(flags, different, tmp_path):
    line = "        for buffer in net.buffers():"  # after the last step, before rank 0's are broadcast
    say = "        print('SUM', sum(b.double().sum().item() for b in net.buffers()), force=True)\n"
    folder = edited(tmp_path / "edited", "ddp_launch_train", (line, say + line))
    finished = run(command("ddp_launch_train", *ON_GPU, *flags, "--precision", "fp32", folder=folder))
    assert result(finished)["gpus"] == 2
    assert len(set(re.findall(r"SUM (\S+)", finished.stdout))) == different


def test_data_parallel_computes_in_bf16(tmp_path):
    line = "    net = build_network(args).to(device)\n"
    say = "    net.conv1.register_forward_hook(lambda module, inputs, output: print('TYPE', output.dtype))\n"
    folder = edited(tmp_path / "edited", "dp_train", (line, line + say))
    finished = run(command("dp_train", *ON_GPU, "--precision", "bf16", folder=folder))
    assert result(finished)["gpus"] == torch.cuda.device_count() == finished.stdout.count("peak GPU memory")
    assert set(re.findall(r"TYPE (\S+)", finished.stdout)) == {"torch.bfloat16"}


@pytest.mark.parametrize("name", [*SCRIPTS[1:3], "apex_amp_train O0", "apex_amp_train O1"])
def test_compiled_it_trains_like_eager(name):
    script, _, level = name.partition(" ")
    flags = ["--backend", "torch", "--opt-level", level] if level else ["--precision", "fp32"]
    flags += ["--epochs", "3", "--limit", "240", "--lr", "0.002"]
    eager, compiled = (run(command(script, *ON_GPU, *flags, *more)) for more in ([], ["--compile"]))
    assert "skipping cudagraphs" not in compiled.stderr
    # Two steps alone: on so small a network rounding grows a thousandfold in the next ones.
    assert losses(compiled)[:2] == pytest.approx(losses(eager)[:2], rel=2e-2 if level == "O1" else 1e-3)
    assert result(compiled)["train_loss"] == pytest.approx(result(eager)["train_loss"], rel=0.1)


@pytest.mark.parametrize("script", ["ddp_launch_train", "ddp_spawn_train"])
def test_a_process_that_hangs_ends_the_run(script, tmp_path):
    hang = "        if dist.get_rank() == 1 and step == 3: time.sleep(1000)\n"
    folder = edited(tmp_path / "edited", script, (STEP, STEP + hang))
    finished = run(command(script, *ON_GPU, "--timeout", "15", folder=folder), timeout=150, real=True)
    assert finished.returncode != 0 and re.search("imed out|timeout", finished.stderr), finished.stderr
    wait_until_gone(process_ids(finished.stdout))


@pytest.mark.parametrize("script", ["dp_train", "ddp_launch_train", "ddp_spawn_train"])
def test_ctrl_c_ends_every_process_within_ten_seconds(script, start):
    running = start(command(script, *ON_GPU, "--epochs", "1000", "--workers", "2"))
    pids = running.pids(1 if script == "dp_train" else 2)
    running.wait_for("epoch 2 step 3")
    os.killpg(running.process.pid, signal.SIGINT)
    running.process.wait(timeout=10)
    wait_until_gone(pids)  # and with a process its memory on the GPU


AMP = [("torch", level) for level in ("O0", "O1", "O3")]
AMP += [pytest.param("apex", level, marks=needs_apex) for level in ("O0", "O1", "O2", "O3")]


@pytest.mark.parametrize(("backend", "level"), AMP)
def test_levels_train(backend, level):
    flags = ["--backend", backend, "--opt-level", level, "--epochs", "3", *["--clip-grad", "5"] * (level != "O2")]
    found = result(run(command("apex_amp_train", *ON_GPU, *flags, *["--sync-bn"] * (level != "O3"))))
    assert (found["precision"], found["gpus"]) == (f"{level} by {backend}", 2) and found["train_loss"] < 2.5


@needs_apex
def test_apex_trains_like_torch():  # its kernels copy gradients memory to memory: they could mix them up
    flags = [*ON_GPU, *"--arch resnet50 --image-size 32 --limit 4096 --batch-size 256 --lr 0.4".split()]
    levels = "torch --opt-level O1", "apex --opt-level O1", "apex --opt-level O2"
    amp, o1, o2 = (losses(run(command("apex_amp_train", *flags, "--backend", *level.split()))) for level in levels)
    assert len(amp) == 16 and o1[:8] + o2[:8] == pytest.approx(amp[:8] * 2, rel=0.1)


@pytest.mark.parametrize(("backend", "level"), [AMP[1], AMP[4], AMP[5]])
def test_a_resumed_run_goes_on_where_it_was(backend, level, tmp_path):
    # The unbroken run keeps a copy of its checkpoint after the first of two epochs. The other one resumes from it.
    line = "            save_checkpoint(args, stateful, epoch, metrics)\n"
    keep = "            save_atomically(torch.load(args.checkpoint), f'{args.checkpoint}.{epoch}')\n"
    folder = edited(tmp_path / "edited", "apex_amp_train", DETERMINISTIC, (line, line + keep))
    flags = ["--backend", backend, "--opt-level", level, "--epochs", "2", "--checkpoint"]
    a, b = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    unbroken = result(run(command("apex_amp_train", *ON_GPU, *flags, a, folder=folder)))
    shutil.copy(f"{a}.1", b)
    resumed = run(command("apex_amp_train", *ON_GPU, *flags, b, folder=folder))
    assert "1 of 2 epochs are done" in resumed.stdout
    assert [result(resumed)[key] for key in METRICS] == pytest.approx([unbroken[key] for key in METRICS], rel=1e-3)
    after, before = (torch.load(path, weights_only=True) for path in (a, b))
    torch.testing.assert_close(after["net"], before["net"], rtol=1e-3, atol=1e-5)
    if backend == "apex":
        assert after["scaler"]["scale"] == before["scaler"]["scale"]
        assert {weight.dtype for weight in after["scaler"]["masters"]} == {torch.float32}
