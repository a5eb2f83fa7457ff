"""Training: what is saved and printed, several processes against one, settings, and runs that were killed."""

import argparse
import ast
import contextlib
import re
import shutil
import sys

import pytest
import torch
from conftest import SMALL, result, run, saved_by, train
from editing import APEX_ON_THE_CPU, FLOAT64, KILLED_IN_EPOCH_2, RESNET, ROOT, SCRIPTS, SMALL_MODEL, copy_script
from pages import before

import dp_train

NOTEBOOK = """import ddp_spawn_train, signal
ddp_spawn_train.load_data = None  # does not reach the processes: they import the file
handler = signal.getsignal(signal.SIGINT)
print('RETURNED', ddp_spawn_train"""
SAME_HANDLER = "assert signal.getsignal(signal.SIGINT) is handler is not signal.SIG_DFL"  # Ctrl-C ends no notebook
EPOCH = r"train_loss (\S+) train_accuracy (\S+) val_loss \S+ val_accuracy \S+ best (\S+) images_per_second \d+\n"


@pytest.fixture(scope="module")
def first_runs(tmp_path_factory):
    """Run each script once, copied with common.py alone. Return the folders, and what the runs printed."""
    runs = {}
    for script in SCRIPTS:
        edits = [("step % 20 == 0", "step % 5 == 0"), ('MAIN_METRIC = "val_', 'MAIN_METRIC = "train_')]
        if script != "dp_train":
            say = "print('MEAN', epoch, model[1].running_mean.tolist(), force=True)\n"
            edits += [SMALL_MODEL, before('        epoch_metrics |= {f"val_', say)]
        edits += [("augment=training)", "augment=(training, print('AUGMENT', training))[0])")]
        edits += [before('    print("RESULT"', "print('FROZEN', gc.get_freeze_count())\n")]
        folder = copy_script(tmp_path_factory.mktemp("a project") / script, script, *edits)
        flags = ["--checkpoint", "new/run.pt", "--clip-grad", "2"]
        if script == "ddp_spawn_train":  # as in a notebook: no other process can import what stands after -c
            notebook = f"{NOTEBOOK}.launch({[*SMALL, *flags]}))\n{SAME_HANDLER}"
            runs[script] = folder / "new", run([sys.executable, "-c", notebook], cwd=folder)
        else:
            runs[script] = folder / "new", train(folder, 2, *flags, script=script)
    return runs


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_copied_script_learns_and_prints_on_rank_0_only_and_saves_the_model(script, first_runs):
    folder, finished = first_runs[script]
    processes = 1 if script == "dp_train" else 2
    assert result(finished)["world_size"] == processes == finished.stdout.count("epochs are done")
    assert len(re.findall(r"^epoch \d step 5/5 loss ", finished.stdout, re.M)) == 2  # epochs
    assert re.findall("AUGMENT (.*)", finished.stdout) == (["True"] * 5 + ["False"] * 6) * 2  # batches of rank 0
    models = re.findall("MEAN .*", finished.stdout)
    assert len(models) == 4 and len(set(models)) == 2 or processes == 1  # of BatchNorm, on two ranks in two epochs
    assert re.search(r"FROZEN [1-9]\d{3}", finished.stdout)  # objects that Python's garbage collector leaves alone
    first, second = ([float(value) for value in epoch] for epoch in re.findall(EPOCH, finished.stdout))
    assert second[0] < first[0] - 0.1 < 3  # a mean over images: at first, about log(10)
    assert 0 < first[1] < second[1] <= 1 and second[1:2] == second[2:]  # the accuracy, and the best one
    state, best = (torch.load(folder / name, weights_only=True) for name in ("run.pt", "run.pt.best"))
    assert all(torch.equal(weight, best[name]) for name, weight in state["model"].items())
    assert not any(name.startswith("module.") for name in state["model"])
    assert state["scheduler"]["total_steps"] == 10  # those of two epochs


def test_spawn_trains_like_launch_bit_for_bit_and_returns_the_metrics_to_a_notebook(first_runs):
    (launch, _), (spawn, finished) = first_runs["ddp_launch_train"], first_runs["ddp_spawn_train"]
    assert saved_by(launch) == saved_by(spawn)
    returned = ast.literal_eval(re.search("RETURNED (.*)", finished.stdout)[1])
    assert returned == torch.load(spawn / "run.pt")["metrics"]


def test_only_some_flags_may_change_when_a_run_resumes(tmp_path):
    args = dp_train.parse_args([])
    path, flags, may_change = tmp_path / "run.pt", vars(args) | dict(steps=5), set()
    dp_train.save_checkpoint(path, flags, {}, 3, dict(val_accuracy=0.5, best=0.6), False)
    for name in [*flags, "new_flag"]:
        with contextlib.suppress(SystemExit):
            assert dp_train.load_checkpoint(path, flags | {name: "other"}, {})[0] == 3
            may_change.add(name)
    assert may_change == {"data_dir", "precision", "compile", "workers", "checkpoint", "new_flag"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_optimizer_and_its_schedule(script):
    module, model = __import__(script), torch.nn.Linear(2, 2)
    for batch_size, lr, peak in (512, None, 0.4), (1024, None, 0.8), (8192, None, 1.6), (8192, 0.1, 0.1):
        optimizer = module.build_optimizer(argparse.Namespace(batch_size=batch_size, lr=lr), model)
        [group] = optimizer.param_groups
        assert dict(lr=peak, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True).items() <= group.items()
    buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert len(buffers) == 2 * (script == "apex_amp_train") and not any(buffer.any() for buffer in buffers)
    scheduler, rates = module.build_scheduler(None, optimizer, 100), []
    for _ in range(99):
        optimizer.step()
        scheduler.step()
        rates.append(group["lr"])
    assert max(rates) == pytest.approx(0.1) and rates[-1] < 1e-3 and group["momentum"] == 0.9


def test_the_default_flags_also_in_a_notebook_that_has_arguments_of_its_own(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["notebook", "-f", "kernel.json"])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    save = lambda main, arguments, nprocs: torch.save(vars(arguments[2]), f"{arguments[1]}/metrics-0")  # noqa: E731
    monkeypatch.setattr(torch.multiprocessing, "spawn", save)
    defaults = dict(data_dir="data", arch="resnet50", image_size=32, epochs=30, precision="fp32", seed=21)
    defaults |= dict.fromkeys("synthetic pretrained batch_size lr clip_grad checkpoint".split())
    assert __import__("ddp_spawn_train").launch() == defaults | dict(workers=0, sync_bn=False, compile=False)
    args = dp_train.parse_args("--pretrained all --data-dir ~ --checkpoint ~/run.pt".split())
    assert args.image_size == 224 and "~" not in args.data_dir + args.checkpoint


# An ordinary copy: own data with random transforms, batches that are dicts, own metrics, a flag that is a Path.
ITEMS = """
def load_data(args):
    class Items(list):  # cannot be pickled
        def __getitem__(self, index):
            assert torch.utils.data.get_worker_info()
            numbers = random.random(), common.np.random.rand(), torch.rand(1).item()
            os.write(1, "ITEM {} {} {}\\n".format(*numbers).encode())
            image, label = super().__getitem__(index)
            return dict(image=image.permute(2, 0, 1)[:, :4, :4] / 64 + sum(numbers), label=label)
    torch.multiprocessing.set_start_method("forkserver", force=True)  # Python 3.14's default
    return [Items(data) for data in common.load_cifar10("", args.synthetic)]
def metrics_from(sums):
    return dict(loss=common.np.float64(sums["loss"]), seen=common.np.int64(sums["images"]), one=torch.ones(1))
if __name__"""
OWN = [
    ("import json\n", "import json\nimport pathlib\nimport random\n"),
    ("\nif __name__", ITEMS),
    SMALL_MODEL,
    ("for tensor in batch)", "for tensor in batch.values())"),
    ('MAIN_METRIC = "val_accuracy"', 'MAIN_METRIC = "val_one"'),  # It does not change, so epoch 1 is the best.
    ('    add("--seed"', '    add("--masks", type=pathlib.Path, default=pathlib.Path("masks"))\n    add("--seed"'),
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_copy_with_own_data_model_and_metrics_resumes_exactly_if_it_is_killed_while_it_saves(script, tmp_path):
    def start(folder, *flags, edits=()):
        copy_script(tmp_path / folder, script, *OWN, *edits)
        return train(tmp_path / folder, 2, "--workers", "2", *flags, script=script)

    uninterrupted, killed = start("uninterrupted"), start("killed", edits=[KILLED_IN_EPOCH_2])
    assert killed.returncode != 0
    of_epoch_1 = torch.load(tmp_path / "killed" / "run.pt", weights_only=True)["model"]
    assert ": 1 epochs are done" in start("killed").stdout
    assert saved_by(tmp_path / "killed") == saved_by(tmp_path / "uninterrupted")
    best = torch.load(tmp_path / "killed" / "run.pt.best", weights_only=True)
    assert torch.equal(best["4.weight"], of_epoch_1["4.weight"])
    assert uninterrupted.stdout.count("train_seen 60") == uninterrupted.stdout.count("val_seen 61") == 2  # epochs
    columns = list(zip(*re.findall("ITEM (.*) (.*) (.*)", uninterrupted.stdout)))
    assert all(len(set(column)) == len(column) > 200 for column in columns)  # No random number is used twice.
    sentence = "run.pt has masks=masks: use the same flags and data, or another file"
    assert sentence in start("killed", "--masks", "other").stdout


def test_a_resume_on_three_machines_without_a_shared_disk_trains_on_like_two(tmp_path):
    own = "args.checkpoint = args.data_dir = f'machine {rank}/run.pt'; args.workers = rank\n"
    count = ("dict(loss=sums", "dict(seen=sums['images'], loss=sums")
    edits = [*FLOAT64, before("    # [DDP 2/7]", own), count]
    train(copy_script(tmp_path / "uninterrupted", "ddp_launch_train", *edits), 2, LOCAL_RANK="0")
    train(copy_script(tmp_path / "resumed", "ddp_launch_train", *edits, KILLED_IN_EPOCH_2), 2, LOCAL_RANK="0")
    resumed = train(copy_script(tmp_path / "resumed", "ddp_launch_train", *edits), 3, LOCAL_RANK="0")
    assert resumed.stdout.count(": 1 epochs are done") == result(resumed)["world_size"] == 3
    assert result(resumed)["val_seen"] == 61  # each image once
    assert {path.parent.name for path in tmp_path.glob("resumed/machine */*")} == {"machine 0"}
    models = [torch.load(path, weights_only=True)["model"] for path in tmp_path.glob("*/machine 0/run.pt")]
    torch.testing.assert_close(*models, rtol=1e-12, atol=1e-12)


CLOCK = ("import time\n", "import time; time.perf_counter = iter(range(9)).__next__\n")  # one second an epoch


def test_1_2_and_3_processes_train_and_validate_alike_on_the_same_global_batch(tmp_path):
    validation = ("    model.eval()\n", "    model.eval(), time.perf_counter()\n")  # takes a second, too
    load = "    return common.load_cifar10(args.data_dir, args.synthetic)"
    data = "common.load_cifar10('', 59)"  # of the two validation images, the third process has none
    few = (load, f"    train_set, val_set = {data}\n    return train_set, val_set[:2]")
    falling = ('MAIN_METRIC = "val_accuracy"', 'MAIN_METRIC = "train_loss"')  # so the best epoch is the first one
    copy_script(tmp_path, "ddp_launch_train", *FLOAT64, few, falling, CLOCK, validation)
    states = []
    for nproc in 1, 2, 3:
        finished = train(tmp_path, nproc, "--checkpoint", f"{nproc}.pt")
        assert finished.stdout.count("images_per_second 48\n") == 2  # of all processes: 4 steps of 12 images
        states.append(torch.load(tmp_path / f"{nproc}.pt", weights_only=True))
        torch.testing.assert_close(states[-1]["model"], states[0]["model"], rtol=1e-12, atol=1e-12)
        assert states[-1]["metrics"] == pytest.approx(states[0]["metrics"], rel=1e-9)
    assert states[0]["metrics"]["best"] > states[0]["metrics"]["train_loss"] + 0.05


# In float64, scaling a loss by a power of two changes no bit of its unscaled gradients.
BITS = [
    (RESNET, f"{SMALL_MODEL[1]}.double()"),
    ("augment=training)  # labels", "augment=training).double()  # labels"),
    ("outputs.float()", "outputs"),
]
SHUFFLED_ALIKE = [
    ("shuffle=True", "sampler=(sampler := torch.utils.data.DistributedSampler(train_set, 1, 0, seed=args.seed))"),
    ("        dp_model.train()", "        sampler.set_epoch(epoch)\n        dp_model.train()"),
]
LIKE_LAUNCH = {  # the number of processes, flags, edits
    "dp_train": (1, [], SHUFFLED_ALIKE),
    "apex_amp_train": (2, [], [('enabled=args.backend == "torch"', "enabled=False")]),
    "apex_amp_train with Apex": (2, "--backend apex --opt-level O2".split(), [APEX_ON_THE_CPU]),
}


@pytest.mark.parametrize("name", LIKE_LAUNCH)
def test_each_script_trains_like_ddp_launch_train_bit_for_bit(name, tmp_path):
    (nproc, flags, edits), script = LIKE_LAUNCH[name], name.split()[0]
    shutil.copytree(ROOT / "tests" / "stand_in", tmp_path / "other")
    common_flags = ["--synthetic", "59", "--clip-grad", "0.125"]  # no equal shares for two processes
    norm = "nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()"
    say = ("            scheduler.step()\n", f"            print('NORM', {norm})\n            scheduler.step()\n")
    launch = train(copy_script(tmp_path / "launch", "ddp_launch_train", *BITS, say), nproc, *common_flags)
    norms = [float(norm) for norm in re.findall("NORM (.*)", launch.stdout)]
    assert norms == [pytest.approx(0.125, rel=1e-5)] * 8
    copy_script(tmp_path / "other", script, *BITS, *edits)
    other = train(tmp_path / "other", nproc, *flags, *common_flags, script=script)
    saved = saved_by(tmp_path / "other")
    saved[0].pop("amp", None)
    assert saved == saved_by(tmp_path / "launch") and result(other) == result(launch)


def test_the_scripts_share_all_lines_that_are_not_their_technique():
    different = {("dp", "ddp_launch"): 150, ("ddp_launch", "ddp_spawn"): 47, ("ddp_launch", "apex_amp"): 100}
    for (one, other), lines in different.items():  # So who changes a line changes it in all scripts.
        diff = run(["diff", f"{one}_train.py", f"{other}_train.py"], cwd=ROOT).stdout
        assert len(re.findall("(?m)^[<>]", diff)) <= lines
