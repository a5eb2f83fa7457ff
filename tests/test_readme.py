"""README: minimal/ and its diff, the resume, and commands for several machines."""

import os
import re
import socket
import sys

import pytest
import torch
from conftest import SMALL, result, run, train_minimal
from editing import IMAGES, ROOT, SMALL_MINIMAL, SMALL_MODEL, copy_script, edited
from pages import after, block, edits_of, line


def test_readme_shows_the_diff_of_the_two_programs():
    files = ROOT / "minimal" / "one_gpu.py", ROOT / "minimal" / "ddp.py"
    diff = run(["diff", "-U", "999", *files]).stdout.split("\n", 3)[3]
    assert f"```diff\n{diff}```\n" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("nproc", [0, 1, 2, 3])
def test_the_programs_learn_and_print_the_accuracy_of_the_model_that_they_save(nproc, tmp_path):
    finished = train_minimal(nproc, tmp_path)
    assert finished.returncode == 0
    printed = [float(accuracy) for accuracy in re.findall(r"epoch \d accuracy (\S+)", finished.stdout)]
    assert len(printed) == 4 and printed[-1] > 0.3  # four epochs, each printed once
    scope = dict(torch=torch, nn=torch.nn)
    exec(f"{IMAGES}\nmodel = {SMALL_MINIMAL['models.resnet50(num_classes=10)']}.eval()", scope)
    images, labels = scope["small_images"](61).tensors
    scope["model"].load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    accuracy = (scope["model"](images).argmax(1) == labels).double().mean().item()
    assert printed[-1] == pytest.approx(accuracy, abs=5e-5)  # of the saved weights, each image counted once


def test_of_two_machines_rank_0_alone_prints_and_saves_and_both_validate_its_model(tmp_path):
    own_folder = after(line("world_size = int"), "os.mkdir(f'machine {rank}')\nos.chdir(f'machine {rank}')\n")
    say = "print(f'SEED {torch.initial_seed()} MEAN {model[2].running_mean.sum()}\\n', end='')\n"
    say = after(line("all_reduce"), say)
    finished = train_minimal(2, tmp_path, ('int(os.environ["LOCAL_RANK"])', "0"), own_folder, say)
    assert finished.returncode == 0 and finished.stdout.count("accuracy") == 4
    seeds, means = zip(*re.findall("SEED (.*) MEAN (.*)", finished.stdout))
    assert len(seeds) == 8 and len(set(seeds)) == 2 and len(set(means)) == 4  # of 2 ranks, and of 4 epochs
    assert [path.parent.name for path in tmp_path.glob("machine */model.pt")] == ["machine 0"]


def test_training_with_model_ends_with_an_error_and_saves_nothing(tmp_path):
    linear = ("models.resnet50(num_classes=10)", "nn.Sequential(nn.Flatten(), nn.Linear(48, 10))")
    finished = train_minimal(2, tmp_path, ("(ddp_model(images)", "(model(images)"), ("lr=1e-3", "lr=1e-5"), linear)
    assert finished.returncode != 0 and "the weights of the ranks differ" in finished.stdout
    assert "accuracy" not in finished.stdout and not (tmp_path / "model.pt").exists()


def test_one_process_downloads_while_the_others_wait(tmp_path):
    make = """    made = datasets.CIFAR10
    def make(*_, train, download=False, **__):
        if download:
            open("downloading", "x").close()  # an error if another process downloads
            time.sleep(0.5)
            os.remove("downloading")
        return made(train=train)
    datasets.CIFAR10 = make
"""
    slow = ("    torch.manual_seed(21)\n", f"    import time\n{make}    torch.manual_seed(21)\n")
    assert train_minimal(2, tmp_path, slow, epochs=1).returncode == 0
    lock, train, val = (line(f"    {text}") for text in ("with FileLock", "train_set =", "val_set ="))
    no_lock = [(lock + train, train[4:]), (val, f"{lock}    {val}")]  # but for the other dataset
    assert "File exists: 'downloading'" in train_minimal(2, tmp_path, slow, *no_lock, epochs=1).stdout


# An edit of the recipe for a resume: what it leaves out.
LEFT_OUT = {
    "nothing": [],
    "the optimizer": [('+        optimizer.load_state_dict(state["optimizer"])\n', "")],
    "the seed": [("+        torch.manual_seed(21 + rank + world_size * epoch)\n", "")],
    "a count": [("dict(model", "dict(count=epoch - epochs_done, model")],  # starts again at 0
}


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_a_resumed_run_saves_what_an_uninterrupted_one_does(left_out, tmp_path):
    dropout = ("    model = model.to(device)", "    model = nn.Sequential(nn.Dropout(0.1), model).to(device)")
    edits = [dropout, *edits_of(edited(block("resume"), *LEFT_OUT[left_out]))]
    assert train_minimal(2, tmp_path, *edits, epochs=2).returncode == 0
    (tmp_path / "run.pt").rename(tmp_path / "uninterrupted.pt")
    stop = ("\n\n    dist.destroy", "\n        break\n\n    dist.destroy")  # after one epoch
    assert train_minimal(2, tmp_path, *edits, stop, epochs=2).returncode == 0
    finished = train_minimal(2, tmp_path, *edits, epochs=2)
    assert "rank 0: run.pt has 1 epochs" in finished.stdout
    compare = [sys.executable, "checks.py", "uninterrupted.pt", "run.pt"]
    assert (run(compare, cwd=tmp_path).returncode == 0) == (left_out == "nothing")


# Two processes of this machine stand for two machines.
HERE = {"per-node=gpu": "per-node=1", "_train.py": f"_train.py {' '.join(SMALL)}", "10.0.0.1": "127.0.0.1"}
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done  # its options
SLURM_NODEID=1 "$@" &
SLURM_NODEID=0 "$@" && wait $!
"""


@pytest.mark.parametrize("name", ["two machines", pytest.param("slurm", marks=pytest.mark.slow)])
def test_the_commands_for_several_machines_train_on_two(name, start, tmp_path):
    copy_script(tmp_path, "ddp_launch_train", SMALL_MODEL)
    for program, text in ("srun", SRUN), ("scontrol", "#!/bin/bash\necho 127.0.0.1\n"):
        (tmp_path / program).write_text(text)
        (tmp_path / program).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    commands = block(name).replace("eth0", "lo").replace("29500", str(port))
    for old, new in HERE.items():
        commands = commands.replace(old, new)
    settings = dict(SLURM_JOB_ID=str(port), SLURM_JOB_NODELIST="", SLURM_CPUS_PER_TASK="1", SLURM_NNODES="2")
    settings |= dict(PATH=f"{tmp_path}:{sys.prefix}/bin:{os.environ['PATH']}")
    if name == "two machines":
        start(["bash", "-c", commands.replace("node-rank=0", "node-rank=1")], "", cwd=tmp_path, **settings)
    assert result(run(["bash", "-c", commands], cwd=tmp_path, **settings))["world_size"] == 2
