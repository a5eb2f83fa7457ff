"""What every recipe must do, shown by runs of the scripts themselves."""

import json
import re
import shutil
import signal
import socket
import sys

import pytest
import torch
import torchvision
from conftest import DEVICE, METRICS, ROOT, SCRIPTS, SMALL, command, copy_recipe, result, run, wait_until_gone

import common

KEYS = """
script launcher backend device gpus world_size pids arch image_size precision batch_size epochs steps
images_per_second seconds_per_20_steps peak_memory_mib train_loss val_loss val_accuracy seconds
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_from_a_copy_with_common_alone(script, first_runs):
    finished, top = first_runs(script)
    found = result(finished)
    assert list(found) == KEYS.split() + ["ddp"] * (script == "apex_amp_train")
    processes = 1 if script == "dp_train" else 2
    assert found["script"] == f"{script}.py"
    assert found["world_size"] == len(set(found["pids"])) == len(found["peak_memory_mib"]) == processes
    assert found["steps"] == 3 * (61 // 12)
    assert found["images_per_second"] == pytest.approx(20 * 12 / found["seconds_per_20_steps"])
    assert min(found["peak_memory_mib"]) > 0
    # The main process alone prints, and the loss falls.
    lines = finished.stdout.splitlines()
    assert sum(line.startswith("technique ") for line in lines) == 1
    assert [line.split()[1:4:2] for line in lines if " step " in line] == [
        [str(epoch), f"{step}/5"] for epoch in (1, 2, 3) for step in range(1, 6)
    ]
    losses = [float(line.split()[3]) for line in lines if line.startswith("epoch") and "train_loss" in line]
    assert len(losses) == 3 and losses[2] < losses[0]
    steps = [float(line.split()[5]) for line in lines if " step " in line]
    assert losses == [pytest.approx(sum(steps[i : i + 5]) / 5, rel=1e-5) for i in (0, 5, 10)]
    assert finished.stderr.count("Traceback") == 0
    assert not list(top.glob("**/*.tmp"))


def test_spawn_from_a_notebook_as_readme_has_it(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    flags = json.dumps([*SMALL, "--epochs", "1", "--device", "cpu"])[1:-1]
    assert code.count('"--epochs", "5"') == 1
    folder = copy_recipe(tmp_path / "project", "ddp_spawn_train")
    # Like a notebook, what stands after -c is no file that another process could import.
    code = code.replace('"--epochs", "5"', flags)
    assert result(run([sys.executable, "-c", code], cwd=folder, real=True))["world_size"] == 2


def test_launch_and_spawn_give_the_same_losses(first_runs):
    launch, spawn = (result(first_runs(script)[0]) for script in ("ddp_launch_train", "ddp_spawn_train"))
    assert [launch[key] for key in METRICS] == [spawn[key] for key in METRICS]


@pytest.mark.parametrize("script", SCRIPTS)
def test_best_weights_load_into_a_bare_resnet(script, first_runs):
    finished, top = first_runs(script)
    state = torch.load(top / "run.best.pt", weights_only=True)
    net = torchvision.models.resnet18(num_classes=10)
    net.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.load_state_dict(state)
    accuracies = [float(line.split()[7]) for line in finished.stdout.splitlines() if " val_accuracy " in line]
    assert torch.load(top / "run.pt", weights_only=True)["best"] == max(accuracies)


def test_tensorboard_holds_the_scalars(first_runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    finished, top = first_runs("ddp_launch_train")
    events = EventAccumulator(str(top / "scalars")).Reload()
    assert set(events.Tags()["scalars"]) == {"train_loss", "val_loss", "val_accuracy", "lr", "images_per_second"}
    assert [event.step for event in events.Scalars("val_loss")] == [1, 2, 3]
    assert events.Scalars("val_loss")[2].value == pytest.approx(result(finished)["val_loss"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_profile_holds_three_steps(script, first_runs):
    finished, top = first_runs(script)
    result(finished)
    events = json.loads((top / "trace.json").read_text())["traceEvents"]
    steps = {event["name"] for event in events if re.match(r"ProfilerStep#", event.get("name", ""))}
    assert len(steps) == 3 and sum(event.get("name") == "aten::cross_entropy_loss" for event in events) >= 3


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_killed_run_resumes_and_ends_like_an_unbroken_one(script, tmp_path, start):
    flags = [*SMALL, "--epochs", "3", "--device", "cpu"]
    if script == "apex_amp_train":
        flags += ["--opt-level", "O0"]
    unbroken = result(run(command(script, *flags, "--checkpoint", str(tmp_path / "a.pt"))))
    again = command(script, *flags, "--checkpoint", str(tmp_path / "b.pt"))
    running = start(again)
    pids = running.pids()
    running.wait_for(r"epoch 2 step")
    running.process.kill()  # the launcher alone: what it started has to end with it
    wait_until_gone(pids)
    finished = run(again)
    assert any(f"epochs      {n} done, {3 - n} to come" in finished.stdout for n in (1, 2)), finished.stdout
    resumed = result(finished)
    assert [resumed[key] for key in METRICS] == [unbroken[key] for key in METRICS]
    a, b = (torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt"))
    assert all(torch.equal(a["model"][key], b["model"][key]) for key in a["model"])
    assert a["scheduler"] == b["scheduler"] and a["best"] == b["best"]
    if script == "dp_train":  # started once more, with nothing left to do, it gives the same result again
        assert [result(run(again))[key] for key in METRICS] == [unbroken[key] for key in METRICS]


def test_every_test_image_counts_once_on_1_2_and_3_processes():
    # With nothing trained, validation over 61 images must not depend on how many processes share them.
    flags = [*SMALL, "--epochs", "1", "--device", "cpu", "--freeze-backbone", "--lr", "0"]
    alone = result(run(command("dp_train", *flags)))
    for nproc in (2, 3):  # and one process is what dp_train.py is
        shared = result(run(command("ddp_launch_train", *flags, nproc=nproc)))
        assert shared["world_size"] == nproc
        assert shared["val_accuracy"] == alone["val_accuracy"]
        assert shared["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-6)


def test_two_processes_train_like_one_on_the_same_global_batch(tmp_path):
    # Without BatchNorm and augmentation, in float64, the number of processes is a matter of rounding alone.
    weights = []
    for nproc in (1, 2):
        folder = copy_recipe(tmp_path / str(nproc), "ddp_launch_train")
        with open(folder / "common.py", "a") as file:
            file.write("""
class BatchTransform(BatchTransform):
    def forward(self, images, train):
        return super().forward(images, train=False).double()


def build_resnet(arch, image_size, pretrained=False):
    net = nn.Sequential()
    net.conv = nn.Conv2d(3, 8, 3)
    net.relu = nn.ReLU()
    net.flat = nn.Flatten()
    net.fc = nn.Linear(8 * 6 * 6, 10)
    return net.double()
""")
        flags = [*SMALL, "--epochs", "2", "--device", "cpu", "--checkpoint", str(folder / "run.pt")]
        found = result(run(command("ddp_launch_train", *flags, nproc=nproc, folder=folder)))
        weights.append((found["train_loss"], torch.load(folder / "run.pt", weights_only=True)["model"]))
    (loss_1, net_1), (loss_2, net_2) = weights
    assert loss_1 == pytest.approx(loss_2, rel=1e-6)  # summed from float64 losses
    for key, value in net_1.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, net_2[key], rtol=1e-12, atol=1e-12)


def test_a_frozen_backbone_stays_as_it_was(tmp_path):
    flags = [*SMALL, "--epochs", "1", "--freeze-backbone", "--checkpoint", str(tmp_path / "run.pt")]
    finished = run(command("ddp_launch_train", *flags, "--device", "cpu"))
    assert "5,130 of them trainable" in finished.stdout, finished.stdout + finished.stderr
    common.seed_everything(21)
    before = common.build_resnet("resnet18", 8).state_dict()
    after = torch.load(tmp_path / "run.pt", weights_only=True)["model"]
    assert {key for key in before if not torch.equal(before[key], after[key])} == {"fc.weight", "fc.bias"}


def test_pretrained_weights_are_loaded_all_but_the_last_layer(tmp_path):
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    weights = torchvision.models.ResNet18_Weights.DEFAULT
    net = torchvision.models.resnet18()
    torch.save(net.state_dict(), folder / weights.url.rpartition("/")[2])
    flags = ["--pretrained", "--image-size", "65", "--freeze-backbone", "--limit", "4", "--batch-size", "2"]
    flags += ["--epochs", "1", "--device", "cpu", "--checkpoint", str(tmp_path / "run.pt")]
    found = result(run(command("ddp_spawn_train", *SMALL, *flags), TORCH_HOME=str(tmp_path)))
    assert found["image_size"] == 65
    after = torch.load(tmp_path / "run.pt", weights_only=True)["model"]
    assert torch.equal(after["layer4.1.conv2.weight"], net.state_dict()["layer4.1.conv2.weight"])
    assert after["fc.weight"].shape == (10, 512)


@pytest.mark.parametrize("script", ["dp_train", "ddp_launch_train", "apex_amp_train"])
def test_one_process_without_a_launcher(script):
    finished = run([sys.executable, str(ROOT / f"{script}.py"), *SMALL, "--epochs", "1", "--device", "cpu"])
    assert result(finished)["world_size"] == 1
    assert ("torchrun --standalone --nproc-per-node=gpu" in finished.stdout) == (script != "dp_train")


def test_the_old_launcher_works_too():
    arguments = command("ddp_launch_train", *SMALL, "--epochs", "1", "--device", DEVICE)
    arguments[2:4] = ["torch.distributed.launch"]
    assert result(run(arguments))["world_size"] == 2


def test_two_launchers_as_on_two_machines_train_like_one(start, first_runs):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    arguments = command("ddp_launch_train", *SMALL, "--epochs", "3", "--device", "cpu", nproc=1)
    arguments[3:4] = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
    machines = [start(arguments), start(arguments)]
    assert [machine.process.wait(timeout=120) for machine in machines] == [0, 0]
    printed = [line for machine in machines for line in machine.log.read_text().splitlines() if "RESULT" in line]
    assert len(printed) == 1  # by rank 0, wherever it runs
    found = json.loads(printed[0].removeprefix("RESULT "))
    one_machine = result(first_runs("ddp_launch_train")[0])
    assert [found[key] for key in ["world_size", *METRICS]] == [one_machine[key] for key in ["world_size", *METRICS]]


def test_bf16():
    flags = ["--epochs", "1", "--device", DEVICE, "--precision", "bf16"]
    found = result(run(command("ddp_launch_train", *SMALL, *flags)))
    assert found["precision"] == "bf16" and found["train_loss"] < 4


def test_compile_starts_with_the_losses_of_eager_mode(first_runs):
    if not shutil.which("g++"):
        pytest.skip("torch.compile needs a C++ compiler")
    compiled = run(command("dp_train", *SMALL, "--epochs", "3", "--device", "cpu", "--compile"))
    assert result(compiled)["steps"] == 15
    # Two steps alone: on so small a network rounding grows a thousandfold in the next three.
    compiled, eager = (
        [float(loss) for loss in re.findall(r"step [12]/5 loss (\S+)", finished.stdout)][:2]
        for finished in (compiled, first_runs("dp_train")[0])
    )
    assert len(eager) == 2 and compiled == pytest.approx(eager, rel=1e-5)


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_opt_levels(level, first_runs):
    flags = [*SMALL, "--epochs", "3", "--device", DEVICE, "--backend", "torch", "--opt-level", level]
    flags += ["--image-size", "4", "--epochs", "1"] if level == "O3" else []  # slow on most CPUs
    found = result(run(command("apex_amp_train", *flags)))
    assert (found["precision"], found["backend"]) == (level, "torch")
    if level == "O0" and DEVICE == "cpu":  # the same arithmetic as ddp_launch_train.py in fp32
        launch = result(first_runs("ddp_launch_train")[0])
        assert [found[key] for key in METRICS] == [launch[key] for key in METRICS]


@pytest.mark.parametrize("script", SCRIPTS)
def test_interrupt_ends_every_process(script, start):
    flags = ["--opt-level", "O0"] if script == "apex_amp_train" else []
    running = start(command(script, *SMALL, *flags, "--epochs", "1000", "--device", DEVICE, "--workers", "1"))
    pids = running.pids()
    running.wait_for("epoch 4 step 2")  # on GPUs within a CUDA graph
    running.process.send_signal(signal.SIGINT)
    running.process.wait(timeout=10)
    assert running.process.returncode != 0
    if script in ("dp_train", "ddp_spawn_train"):
        assert running.process.returncode == 130
        # Not always the last line of spawn: a data-loading process may still say that its reader is gone.
        assert running.log.read_text().count(f"{script}.py: stopped; with --checkpoint FILE") == 1
    wait_until_gone(pids)


def test_processes_that_find_different_checkpoints_say_so(tmp_path):
    # As on two machines without a shared disk: one process has a checkpoint after epoch 1, the other none.
    flags = [*SMALL, "--epochs", "2", "--device", "cpu", "--checkpoint", "run.pt"]
    folder = copy_recipe(tmp_path / "project", "ddp_spawn_train")
    path = folder / "ddp_spawn_train.py"
    line = "    rank, local_world_size = local_rank, world_size\n"
    path.write_text(path.read_text().replace(line, f"    os.chdir(f'../{{local_rank}}')\n{line}"))
    for rank in "01":
        (tmp_path / rank).mkdir()
    result(run(command("ddp_spawn_train", *flags, folder=folder), cwd=folder))
    (tmp_path / "0" / "run.pt").replace(tmp_path / "1" / "run.pt")
    finished = run(command("ddp_spawn_train", *flags, folder=folder), cwd=folder)
    assert finished.returncode == 2 and "put it on a disk that all machines share" in finished.stderr


@pytest.mark.parametrize("script", ["ddp_launch_train", "ddp_spawn_train"])
def test_a_process_that_raises_shows_its_traceback_and_ends_the_others(script, tmp_path):
    folder = copy_recipe(tmp_path / "project", script)
    path = folder / f"{script}.py"
    text = path.read_text()
    line = "            scheduler.step()\n"
    assert text.count(line) == 1
    fault = "            if rank == 1 and epoch == 4: raise OSError('disk on fire')\n"
    path.write_text(text.replace(line, line + fault))
    arguments = command(script, *SMALL, "--epochs", "1000", "--device", DEVICE, folder=folder)
    finished = run(arguments, timeout=120, real=True)
    assert finished.returncode == 1
    last = finished.stderr.rpartition("Traceback (most recent call last)")  # of the process at fault, and named
    assert "OSError: disk on fire" in last[2]
    assert ("rank      : 1" if script == "ddp_launch_train" else "-- Process 1 terminated") in last[0][-700:]
    pids = finished.stdout.partition("process ids [")[2].partition("]")[0].split(", ")
    assert len(pids) == 2
    wait_until_gone(pids)
