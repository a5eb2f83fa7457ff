"""What only GPUs can show. Apex is tested if it can be imported, tag 25.04."""

import os
import re
import signal

import pytest
import torch
from conftest import ROOT, SCRIPTS, command, copy_script, process_ids, result, run, wait_until_gone
from test_gradients import run_and_resume

from apex_amp_train import amp

GPUS = min(torch.cuda.device_count(), 2)
pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
FLAGS = "--device cuda --image-size 8 --limit 240 --batch-size 24 --lr 0.002".split()


def train(script, *flags, folder=ROOT):
    return run(command(script, *FLAGS, *flags, nproc=GPUS, folder=folder))


def losses(finished):
    assert result(finished)["gpus"] >= 1
    return [float(loss) for loss in re.findall(r"step \d+/\d+ loss (\S+)", finished.stdout)]


@pytest.mark.parametrize("script", SCRIPTS[:3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_trains_on_all_gpus_and_compiled_alike(script, precision):
    eager = losses(train(script, "--precision", precision))
    if script == "dp_train" and GPUS > 1:
        return  # --compile is for one GPU
    compiled = losses(train(script, "--precision", precision, "--compile"))
    # The first steps alone: on so small a network, rounding grows a thousandfold in the next ones.
    assert compiled[:2] == pytest.approx(eager[:2], rel=1e-3 if precision == "fp32" else 2e-2)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("flags", "different"), [(["--sync-bn"], 1), ([], 2)])
def test_sync_bn_gives_all_processes_the_same_statistics(flags, different, tmp_path):
    line = "        for buffer in net.buffers():"  # after the last step, before rank 0's are broadcast
    say = "        print('SUM', sum(b.double().sum().item() for b in net.buffers()), force=True)\n"
    folder = copy_script(tmp_path / "copy", "ddp_launch_train", (line, say + line))
    finished = train("ddp_launch_train", *flags, "--precision", "fp32", "--epochs", "1", folder=folder)
    assert result(finished)["gpus"] == 2 and len(set(re.findall(r"SUM (\S+)", finished.stdout))) == different


@pytest.mark.parametrize("level", ["torch", "O0", "O1", "O2", "O3"] if amp else ["torch"])
def test_every_level_trains_clips_and_resumes_like_an_unbroken_run(level, tmp_path):
    line = "    train_set, val_set"
    same = (line, f"    torch.backends.cudnn.deterministic = True\n{line}")
    apex = "" if level == "torch" else f" --backend apex --opt-level {level}"
    _, *folders = run_and_resume(tmp_path, " ".join(FLAGS) + " --clip-grad 1" + apex, same)
    weights = [torch.load(folder / "run.pt", weights_only=True)["net"] for folder in folders]
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("script", ["ddp_launch_train", "ddp_spawn_train"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_a_killed_process_end_all_processes(script, sent, start):
    process, log = start(command(script, *FLAGS, "--epochs", "1000", nproc=2), "epoch 2 step 3")
    pids = process_ids(log.read_text())
    os.killpg(process.pid, sent) if sent == signal.SIGINT else os.kill(pids[1], sent)
    assert process.wait(timeout=60) != 0
    wait_until_gone(pids)  # and with a process its memory on the GPU
