"""What only GPUs can show. Skipped, by name, where there are fewer than two."""

import os
import re

import pytest
import torch
from conftest import ROOT, SMALL, command, copy_recipe, result, run

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ON_GPU = [*SMALL, "--epochs", "1", "--device", "cuda"]


def edited(tmp_path, script, old, new):
    """Copy a recipe with one line changed."""
    folder = copy_recipe(tmp_path / "edited", script)
    path = folder / f"{script}.py"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return folder


def test_sync_bn_gives_all_processes_the_same_statistics(tmp_path):
    # Right after the last step, before anything is averaged.
    folder = edited(
        tmp_path,
        "ddp_launch_train",
        "        for buffer in net.buffers():\n",
        "        print('SUM', sum(b.double().sum().item() for b in net.buffers()), force=True)\n"
        "        for buffer in net.buffers():\n",
    )
    for flags, different in (["--sync-bn"], 1), ([], 2):
        finished = run(command("ddp_launch_train", *ON_GPU, *flags, "--precision", "fp32", folder=folder))
        assert result(finished)["gpus"] == 2
        assert len(set(re.findall(r"SUM (\S+)", finished.stdout))) == different


def test_a_subset_of_the_gpus():
    last = torch.cuda.device_count() - 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(last + 1)))).split(",")
    found = result(run(command("ddp_spawn_train", *ON_GPU, nproc=1), CUDA_VISIBLE_DEVICES=visible[last]))
    assert found["gpus"] == 1 and found["backend"] == "nccl"


def test_data_parallel_threads_compute_in_bf16(tmp_path):
    folder = edited(
        tmp_path,
        "dp_train",
        "    model = nn.DataParallel(net) if gpus > 1 else net\n",
        "    model = nn.DataParallel(net) if gpus > 1 else net\n"
        "    net.conv1.register_forward_hook(lambda module, inputs, output: print(f'TYPE {output.dtype} ', end=''))\n",
    )
    finished = run(command("dp_train", *ON_GPU, "--precision", "bf16", folder=folder))
    assert result(finished)["gpus"] == torch.cuda.device_count() == len(result(finished)["peak_memory_mib"])
    assert set(re.findall(r"TYPE (\S+)", finished.stdout)) == {"torch.bfloat16"}


@pytest.mark.parametrize("script", ["ddp_launch_train", "apex_amp_train"])
def test_the_step_loop_never_waits_for_the_gpu(script, tmp_path):
    # PyTorch raises an error for every call that synchronises, from the third step (DDP orders its buckets in the
    # second) to the end of the loop.
    folder = copy_recipe(tmp_path / "edited", script)
    path = folder / f"{script}.py"
    text = path.read_text()
    start, end = "            timed += 1\n", "        if cuda:\n            torch.cuda.synchronize()\n"
    assert text.count(start) == text.count(end) == 1
    text = text.replace(start, start + "            step == 2 and torch.cuda.set_sync_debug_mode('error')\n")
    path.write_text(text.replace(end, "        torch.cuda.set_sync_debug_mode('default')\n" + end))
    assert result(run(command(script, *ON_GPU, folder=folder)))["steps"] == 5


def test_more_processes_than_gpus():
    count = torch.cuda.device_count() + 1
    finished = run(command("ddp_spawn_train", *ON_GPU, "--batch-size", str(count), nproc=count), cwd=ROOT)
    assert finished.returncode == 2 and "start one process per GPU" in finished.stderr
