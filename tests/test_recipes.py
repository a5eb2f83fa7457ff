"""minimal/ and RECIPES.md: each block runs in one of our scripts, in minimal/ddp.py or in a small program."""

import ast
import os
import re
import shutil
import socket
import sys
from textwrap import dedent, indent

import pytest
import torch
from conftest import SMALL, in_group, in_processes, result, run, saved_by, train, train_minimal
from editing import FLOAT64, IMAGES, KILLED_IN_EPOCH_2, ROOT, SCRIPTS, SMALL_MODEL, copy_script, edited
from pages import LAUNCH, MINIMAL, after, at, before, block, edits_of, line, pieces, said

PAGE = (ROOT / "RECIPES.md").read_text()


def functions(*codes):
    """Return an edit that adds functions at the end of a script, where they replace those of the same name."""
    return "\nif __name__", "\n".join(["", *codes, "\nif __name__"])


# The scripts that a diff fits. Other diffs fit all scripts with DDP.
FITS = {"early stopping": SCRIPTS, "our accumulation": SCRIPTS[1:3], "apex ddp": SCRIPTS[3:]}


def test_each_block_is_tested_each_diff_fits_its_scripts_and_the_index_links_to_each_recipe(tmp_path):
    blocks = re.findall(r"<!-- test: (.*?) -->\n```(\w+)\n", PAGE)
    tests = "".join(file.read_text() for file in (ROOT / "tests").glob("*.py"))
    assert len(blocks) == len(dict(blocks)) == PAGE.count("\n```") / 2
    assert all(re.search(f"""["']{name}["']""", tests) for name, _ in blocks)
    for name in [name for name, language in blocks if language == "diff" and name != "resuming"]:
        for script in FITS.get(name, SCRIPTS[1:]):
            folder = copy_script(tmp_path, script, *edits_of(block(name)))
            compile((folder / f"{script}.py").read_text(), script, "exec")
    titles = re.findall("(?m)^## (.*)", PAGE)
    anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
    assert sorted(re.findall(r"\(#(.*?)\)", PAGE.split("\n## ")[0])) == sorted(anchors)
    assert set(re.findall(r"\(#(.*?)\)", PAGE)) <= set(anchors)


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
    exec(IMAGES, scope)
    images, labels = scope["small_images"](61).tensors
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 10), torch.nn.BatchNorm1d(10)).eval()
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    accuracy = (model(images).argmax(1) == labels).double().mean().item()
    assert printed[-1] == pytest.approx(accuracy, abs=5e-5)  # of the saved weights, each image counted once


# ------------------------------------------------------------ Losses: one gradient, in a small program
LOSS_PROGRAM = """
import contextlib
torch.set_default_dtype(torch.float64)
device, mine, class_weights = "cpu", slice(rank, None, world_size), torch.tensor([1.0, 5.0, 0.2, 3.0])
results = {}
for name, case in CASES.items():
    torch.manual_seed(1)
    model, images, labels = nn.Conv2d(5, 4, 1), torch.randn(12, 5, 2, 3), torch.randint(4, (12, 2, 3))
    labels[:2] = labels[torch.rand(labels.shape) < 0.3] = -100  # ignored
    images, labels, ddp_model = images[mine], labels[mine], DDP(model)
    exec(case)
    losses = [None] * world_size
    dist.all_gather_object(losses, loss.item())
    results[name] = torch.cat([weight.grad.flatten() for weight in model.parameters()]), losses
if rank == 0:
    torch.save(results, "results.pt")
"""
WEIGHTED = "loss = nn.functional.cross_entropy(ddp_model(images), labels, class_weights)\nloss.backward()\n"
SMOOTHED = WEIGHTED.replace("weights)", "weights, label_smoothing=0.1)")
in_parts = f"""weights = class_weights[labels.clamp(min=0)] * (labels != -100)
total, whole_loss, parts = {said("sum_over_all(weights.sum())")}, 0, list(zip(images.split(1), labels.split(1)))
for number, (images, labels) in enumerate(parts, 1):
    with contextlib.nullcontext() if number == len(parts) else ddp_model.no_sync():
        loss = nn.functional.cross_entropy(ddp_model(images), labels, class_weights, reduction="sum")
        loss = sum_over_all(loss) / total
        loss.backward()
    whole_loss += loss.detach()
loss = whole_loss
"""
gathered, views = pieces("gathered")
views = f"view_1, view_2 = images, images.flip(1)\n{views}"
CONTRAST = "loss = -(first.flatten(1) @ second.flatten(1).T).log_softmax(1).diagonal().mean()\nloss.backward()\n"
LOSSES = {  # the ordinary code for one process, the recipe
    "class weights, gathered": (WEIGHTED, f"{gathered}loss.backward()"),
    "class weights and smoothing, by sums": (SMOOTHED, f"{block('by sums')}loss.backward()"),
    "class weights, in parts": (WEIGHTED, in_parts),
    "two views": (views.replace("gather(rows)", "rows") + CONTRAST, views + CONTRAST),
}


def test_the_loss_and_its_gradient_are_those_of_one_process(tmp_path):
    runs = {}  # (code, number of processes): name: gradient and losses
    ordinary, recipe = 0, 1
    for code, nproc in (ordinary, 1), (ordinary, 2), (recipe, 1), (recipe, 2), (recipe, 3):
        cases = {name: codes[code] for name, codes in LOSSES.items()}
        in_group(nproc, tmp_path, f"{block('sum over all')}\nCASES = {cases!r}\n{LOSS_PROGRAM}")
        runs[code, nproc] = torch.load(tmp_path / "results.pt")
    for name in LOSSES:
        expected, [loss] = runs[ordinary, 1][name]
        for nproc in 1, 2, 3:
            gradient, losses = runs[recipe, nproc][name]
            assert (gradient - expected).norm() < 1e-12 * expected.norm(), (name, nproc)
            assert losses == pytest.approx([loss] * nproc, rel=1e-12), (name, nproc)
        wrong, _ = runs[ordinary, 2][name]
        assert (wrong - expected).norm() > 1e-3 * expected.norm(), name  # so the recipe is needed


# ------------------------------------------------------------ Trainings: the same weights on 1, 2 and 3 processes
NET = "nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 10))"
SGD = "    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)\n"
# Edits of minimal/ddp.py: float64, and no BatchNorm.
EXACT = [
    functions("import contextlib, glob, itertools, math\ntorch.set_default_dtype(torch.float64)\n"),
    ("batch_size=512, sampler", "batch_size=12 // world_size, sampler"),
    at(line("model = models"), f"model = {NET}\n"),
    (line("optimizer = "), SGD),  # AdamW would not see a wrong factor
]
EPOCHS, SET_EPOCH, LOOP = line("    for epoch in"), line("set_epoch"), line("in train_loader", 2)
LOSS, STEP = line("loss = nn"), line("optimizer.zero_grad", 3)
SAMPLER, WRAPPED = line("= DistributedS"), line("= DDP")
OUR_SAMPLER, OUR_LOADER = line("= DistributedS", text=LAUNCH), line("train_loader = DataL", text=LAUNCH)
LOSS_AND_STEP = dedent(LOSS + STEP)

# The labels 0 to 3 are ignored, and the others have different weights.
OURS_LABELLED = after(line(r"tensor.to\(device", text=LAUNCH), "labels = labels.where(labels > 3, -100)\n")
WEIGHTS = "torch.arange(1, 11).double()"
weighted_diff = edits_of(block("our weights").replace("torch.ones(10, device=device)", WEIGHTS))
OUR_WEIGHTS = [OURS_LABELLED, functions(block("sum over all")), *weighted_diff]
ours_ordinary = OURS_LABELLED, ("outputs.float(), labels)", f"outputs.float(), labels, {WEIGHTS})")

weighted_sampler, use_of_sampler = pieces("weighted sampler")
OUR_SAMPLING = [functions(weighted_sampler), at(OUR_SAMPLER, use_of_sampler)]
accumulation = f"for images, labels in train_loader:\n{indent(block('accumulation').replace('128', '4'), '    ')}"
OUR_PARTS = [functions("import contextlib"), *edits_of(block("our accumulation").replace("128", "4"))]

# Both unfreeze the first layer in the second epoch.
unfreeze, wrap_again = (piece.replace("conv1", "get_submodule('1')") for piece in pieces("unfreezing"))
find_unused, unfreeze = unfreeze.replace(">= 2", ">= 1").splitlines(True)
wrap_again = wrap_again.replace("== 2", "== 1")
FROZEN = before(WRAPPED, "model[1].requires_grad_(False)\n")
WITHOUT_DDP = [at(WRAPPED, "ddp_model = model\n"), after(SET_EPOCH, unfreeze)]

wrap, gan = pieces("GAN")
gan = edited(gan, ("torch.randn(len(images), 64, device=device)", "nn.functional.pad(images.flatten(1), (0, 16))"))
for name, value in ("optimizer_d", "loss_d"), ("optimizer", "loss"):
    update = f"{name}.zero_grad()\n{value}.backward()\n{name}.step()\n"
    gan = edited(gan, (line(rf"\.\.\.  # {name}:", text=gan), update))
TWO_MODELS = """generator = nn.Sequential(nn.Linear(64, 48), nn.Unflatten(1, (3, 4, 4)))
discriminator = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 1))
model = nn.Sequential(generator, discriminator).to(device)
optimizer, optimizer_d = (torch.optim.SGD(part.parameters(), 0.1) for part in model)
"""
OF_GAN = [at(SGD, TWO_MODELS), at(LOSS + STEP, gan), at(line(r"correct \+="), "pass\n")]

LOAD = f"""steps_done = 0
if glob.glob("run-*.pt"):
    state = torch.load({said('max(glob.glob("run-*.pt"))')})
    model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
    steps_done = state["steps_done"]
"""


def by_steps(last, *edits):
    """Return edits to train up to a step, from the newest file if there is one, and to save every three steps."""
    loop = block("every n steps").replace("1000", "3").replace("    ...  # steps 6 and 7\n", "")
    place = line(r"\.\.\.  # the", text=loop)
    loop = edited(loop, ("= 10 * len(train_loader)", f"= {last}"), at(place, LOSS_AND_STEP), *edits)
    return [before(WRAPPED, LOAD), at(MINIMAL[MINIMAL.index(EPOCHS) : MINIMAL.index(STEP)] + STEP, loop)]


TEXT_DATA = """
def load_data(args):
    random = torch.Generator().manual_seed(1)
    texts = [torch.randint(1, 9, (n,), generator=random) for n in torch.randint(2, 40, (61,), generator=random)]
    items = [{} for words in texts]
    return items, items
"""
bucket_sampler, collate, our_lines = re.split(r"\n\n(?=def collate)|\n\n# In main.*\n", block("buckets"))
mask, longest = pieces("padding")
longest = re.sub("(?m)^", "if training: ", longest.rstrip()) + "\n"
NO_MASK = "mask = torch.ones_like(words)\n"


def with_texts(padding):
    """Return edits of our script: it trains with texts in buckets, and does something about the padding."""
    batch = "words, lengths, labels = batch\nimages = torch.zeros(1)  # not used\n"
    model = "def build_model(args):\n    return nn.Embedding(9, 10).double()\n"
    mean = "(model(words) * mask[..., None]).sum(1) / mask.sum(1)[:, None]"  # sees the padding where the mask is 1
    return [
        *zip((OUR_SAMPLER, OUR_LOADER), our_lines.splitlines(True)),
        functions(bucket_sampler, collate, TEXT_DATA.format("(words, len(words) % 10)"), model),
        at(line(r"tensor.to\(device", text=LAUNCH), batch, padding),
        ("outputs = model(images)", f"outputs = {mean}"),
    ]


# What the page uses of transformers and peft. (With the libraries themselves, it was tried by hand.)
HUB = """
from types import SimpleNamespace

class LanguageModel(nn.Sequential):
    def forward(self, input_ids, labels):
        logits = super().forward(input_ids)
        return SimpleNamespace(logits=logits, loss=nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:]))

def DataCollatorForLanguageModeling(tokenizer, mlm):
    assert tokenizer.pad_token == "</s>" and not mlm
    pad = lambda items, value: nn.utils.rnn.pad_sequence([item["input_ids"] for item in items], True, value)
    return lambda items: dict(input_ids=pad(items, 0), labels=pad(items, -100))

tiny = lambda: LanguageModel(nn.Embedding(9, 8), nn.Tanh(), nn.Linear(8, 9)).double()
AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: SimpleNamespace(eos_token="</s>"))
AutoModelForCausalLM = SimpleNamespace(from_pretrained=lambda name: tiny())
LoraConfig = dict
get_peft_model = lambda model, config: (model[0].requires_grad_(False), model)[1]
"""
hub = edited(block("hugging face"), ("logits.mT.float()", "logits.mT"))
own_loss = edited(hub, ("sum_over_all(loss) / sum_over_all(tokens) if training else loss", "model(**batch).loss"))
OF_HUB = [HUB, block("sum over all"), TEXT_DATA.format("dict(input_ids=words)")]

# Name: script, edits for the ordinary code of one process (None: there is none), edits for the recipe.
SAME = {
    "class weights": ("ddp_launch_train", ours_ordinary, OUR_WEIGHTS),
    "weighted sampling": ("ddp_launch_train", None, OUR_SAMPLING),
    "steps": ("minimal", [], by_steps(10)),
    "parts of batches": ("minimal", [], [at(LOOP + LOSS + STEP, accumulation, "    optimizer.step()\n")]),
    "parts of our batches": ("ddp_launch_train", [], OUR_PARTS),
    "unfreezing": ("minimal", WITHOUT_DDP, [at(WRAPPED, find_unused), after(SET_EPOCH, unfreeze)]),
    "wrapping again": ("minimal", WITHOUT_DDP, [FROZEN, after(SET_EPOCH, wrap_again)]),
    "GAN": ("minimal", [*OF_GAN, at(WRAPPED, wrap.replace("DDP(", "("))], [*OF_GAN, at(WRAPPED, wrap)]),
    "masks": ("ddp_launch_train", None, with_texts(mask)),
    "equal lengths": ("ddp_launch_train", with_texts(NO_MASK), with_texts(longest + NO_MASK)),
    "Hugging Face": ("ddp_launch_train", [functions(*OF_HUB, own_loss)], [functions(*OF_HUB, hub)]),
}
RIGHT_ON_TWO = ["steps", "parts of batches", "parts of our batches"]  # so is the ordinary code


def train_on(nproc, folder, script, edits, epochs=2):
    """Train an edited script from new. Return how the run ended, and its weights (None if it failed)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if script == "ddp_launch_train":
        copy_script(folder, script, *edits, *FLOAT64)
        finished = train(folder, nproc, "--batch-size", "18")
        return finished, None if finished.returncode else torch.load(folder / "run.pt")["model"]
    finished = train_minimal(nproc, folder, *EXACT, *edits, epochs=epochs, images=60)
    return finished, None if finished.returncode else torch.load(folder / "model.pt")


def equal(weights, expected):
    """Return whether weights are the same but for rounding, in float64."""
    return all(torch.allclose(weights[name], expected[name], rtol=1e-12, atol=1e-12) for name in expected)


@pytest.mark.parametrize("name", SAME)
def test_1_2_and_3_processes_end_with_the_same_weights(name, tmp_path):
    script, ordinary, recipe = SAME[name]
    _, expected = train_on(1, tmp_path / "run", script, recipe if ordinary is None else ordinary)
    for nproc in (2, 3) if ordinary is None else (1, 2, 3):
        assert equal(train_on(nproc, tmp_path / "run", script, recipe)[1], expected), nproc
    if ordinary is not None and name not in RIGHT_ON_TWO:
        _, weights = train_on(2, tmp_path / "run", script, ordinary)
        assert weights is None or not equal(weights, expected)  # so the recipe is needed


DROPOUT = ("nn.Tanh()", "nn.Dropout(0.1)")


def test_a_resumed_run_is_that_of_an_uninterrupted_one_and_other_settings_end_it(tmp_path):
    resume, whole, parts = edits_of(block("resuming")), tmp_path / "whole", tmp_path / "parts"
    for folder, epochs in (whole, 3), (parts, 2), (parts, 3):
        assert train_minimal(2, folder, *resume, *EXACT, DROPOUT, epochs=epochs, images=60).returncode == 0
    expected, resumed = (torch.load(folder / "run.pt") for folder in (whole, parts))
    assert resumed["epochs_done"] == 3 and equal(resumed["model"], expected["model"])
    finished = train_minimal(3, parts, *resume, *EXACT, images=60)
    assert finished.returncode != 0 and "run.pt has {'batch_size': 80," in finished.stdout


def test_a_loop_that_saves_every_3_steps_resumes_within_an_epoch_also_with_workers_and_keeps_3_files(tmp_path):
    def weights_of(folder, last):
        steps = by_steps(last, ("num_workers=8", "num_workers=2, multiprocessing_context='fork'"))
        assert train_minimal(2, folder, *EXACT, DROPOUT, *steps, images=60).returncode == 0
        return torch.load(max(folder.glob("run-*.pt")))["model"]

    expected = weights_of(tmp_path / "two", 14)
    assert sorted(path.name for path in tmp_path.glob("two/run-*")) == [f"run-{n:08}.pt" for n in (10, 13, 14)]
    assert not equal(weights_of(tmp_path / "resumed", 8), expected)
    for _ in "resumed", "finished":
        assert equal(weights_of(tmp_path / "resumed", 14), expected)


SCORES = """
from argparse import Namespace
import common, torchmetrics
from ddp_launch_train import all_reduced
from torchmetrics.functional.classification import multiclass_auroc, multiclass_f1_score

generator = torch.Generator().manual_seed(1)
images, labels = torch.randn(61, 3, 4, 4, generator=generator), torch.randint(10, (61,), generator=generator)
model, share = nn.Sequential(nn.Flatten(), nn.Linear(48, 10)), slice(rank, None, world_size)
for weight in model.parameters():
    nn.init.normal_(weight, generator=generator)
outputs = model(images)
confusion = all_reduced(dict(confusion=confusion_of(outputs[share], labels[share])))["confusion"]
torch.testing.assert_close(f1_of(confusion).float(), multiclass_f1_score(outputs, labels, 10, average="macro"))
batches = list(zip(images[share].split(7), labels[share].split(7)))
metrics = validate(Namespace(image_size=4, pretrained=None), model, batches, "cpu")
assert metrics["accuracy"] == (outputs.argmax(1) == labels).double().mean()
torch.testing.assert_close(metrics["auc"], multiclass_auroc(outputs.softmax(1), labels, 10))
"""


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_f1_and_auc_are_those_of_all_images(nproc, tmp_path):
    copy_script(tmp_path, "ddp_launch_train")
    in_group(nproc, tmp_path, block("confusion") + block("gather rows") + SCORES)


STAND_INS = """
wandb_id = None
class wandb:
    init = staticmethod(lambda **settings: print("INIT"))
    log = staticmethod(lambda values, step: print("LOG", values, step))
tqdm = lambda items, disable: items if disable else (print("BAR"), items)[1]
"""


def test_rank_0_alone_logs_the_loss_of_all_ranks(tmp_path):
    init, loop, log = pieces("logging")
    loop = edited(loop, at(line(r"\.\.\.  #", text=loop), LOSS_AND_STEP))
    edits = [functions(STAND_INS), before(EPOCHS, init), before(line("if rank == 0"), log)]
    losses = []
    for nproc in 1, 2, 3:
        finished, _ = train_on(nproc, tmp_path / "run", "minimal", [*edits, at(LOOP + LOSS + STEP, loop)])
        counts = [len(re.findall(f"(?m)^{word}", finished.stdout)) for word in ("INIT", "BAR", "LOG", "epoch")]
        assert finished.returncode == 0 and counts == [1, 2, 2, 2]
        losses += [ast.literal_eval(values)["loss"] for values in re.findall("LOG ({.*}) 1", finished.stdout)]
    assert len(losses) == 3 and losses == pytest.approx([losses[0]] * 3, rel=1e-12)


def test_all_processes_stop_early_in_one_epoch_also_when_the_command_is_repeated(tmp_path):
    copy_script(tmp_path, "ddp_launch_train", *edits_of(block("early stopping")), *FLOAT64)
    first, again = (train(tmp_path, 2, "--lr", "1e-9", "--epochs", "9") for _ in range(2))
    assert first.stdout.count(" train_loss ") == 6 and " train_loss " not in again.stdout
    assert result(first) == result(again)


def test_classes_are_drawn_equally_often_and_buckets_have_each_item_once_and_similar_lengths():
    lengths, labels = torch.arange(500, 289, -1).tolist(), torch.tensor([0] * 900 + [1] * 100 + [2])
    scope = vars(torch.utils.data) | dict(torch=torch, train_set=[(None, label) for label in labels])
    exec(edited(block("weighted sampler"), ("seed=21", "1, 0, seed=21")), scope)  # of one process
    exec(edited(bucket_sampler, ("(lengths, seed", "(lengths, 1, 0, seed")), scope)
    sampler, buckets = scope["sampler"], scope["Buckets"](lengths, 24, 21)
    first = [*sampler], [*buckets]
    sampler.set_epoch(1), buckets.set_epoch(1)
    assert all(270 < count < 400 for count in labels[first[0]].bincount()) and [*sampler] != first[0]
    assert len(buckets) == 8 and len(set(sum(buckets, []))) == 192 and [*buckets] != first[1]
    assert all(max(batch) - min(batch) < 24 + 19 for batch in buckets)  # 19 items are left out


def test_a_stream_with_workers_yields_no_item_twice_and_equally_many_on_all_ranks(tmp_path):
    program = f"import itertools\nfrom torch.utils.data import DataLoader\n{block('stream')}" + """
train_set = Stream(lambda epoch: iter(range(100 * epoch, 100 * epoch + 71)), 71)
loader = DataLoader(train_set, 6, drop_last=True, num_workers=2, multiprocessing_context="fork")
for epoch in 1, 2:
    train_set.epoch = epoch
    print(f"{[batch.tolist() for batch in loader]}\\n", end="")
"""
    ranks = [ast.literal_eval(batches) for batches in in_group(2, tmp_path, program).splitlines()]
    items = [item for batches in ranks for batch in batches for item in batch]
    assert [len(batches) for batches in ranks] == [4] * 4  # of 71: each of four workers has two batches of six
    assert len(set(items)) == len(items) == 96


def test_ema_resumes_exactly_and_the_best_weights_give_the_best_metrics(tmp_path):
    make, update, buffers = (re.sub("  # .*", "", piece).replace("0.999", "0.9") for piece in pieces("EMA"))
    say = "print('EMA', [*ema.state_dict().values()], force=True)\n"
    best, stateful = said('stateful["ema"].module.state_dict()'), line("stateful = ", text=LAUNCH)
    edits = [
        after("            scheduler.step()\n", update),
        before(line("for buffer in", text=LAUNCH), buffers, say),
        (stateful, at(stateful, make)[1] + stateful + at(stateful, said('stateful["ema"] = ema'))[1] + "\n"),
        ("validate(args, model, val", f"validate(args, {said('ema.module')}, val"),
        ("save_atomically(" + said('states["model"]'), f"save_atomically({best}"),
        functions("from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn"),
        SMALL_MODEL,
    ]
    folder, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    finished = train(copy_script(folder, "ddp_launch_train", *edits), 2, "--epochs", "3")
    copy_script(killed, "ddp_launch_train", *edits, KILLED_IN_EPOCH_2)
    assert train(killed, 2, "--epochs", "3").returncode != 0
    resumed = train(copy_script(killed, "ddp_launch_train", *edits), 2, "--epochs", "3")
    assert ": 1 epochs are done" in resumed.stdout
    assert result(resumed) and saved_by(killed) == saved_by(folder)
    lines = sorted(re.findall(r"EMA \[.*?\)\]", finished.stdout, re.S))
    assert len(lines) == 6 and lines[::2] == lines[1::2] and len(set(lines)) == 3  # of 3 epochs, on 2 ranks

    (folder / "evaluate.py").write_text(block("evaluation"))
    evaluated = ast.literal_eval(in_processes(0, folder, "evaluate.py").stdout)
    assert evaluated["accuracy"] == pytest.approx(result(finished)["best"])


def test_torchrun_writes_a_log_for_each_rank_and_restarts_a_run_that_was_killed(tmp_path):
    uninterrupted = copy_script(tmp_path / "uninterrupted", "ddp_launch_train", SMALL_MODEL)
    assert result(train(uninterrupted, 2))
    once = "if rank == 1 and epoch == step == 2 and not os.path.exists('killed'):\n"
    kill = "    open('killed', 'w').close(), os.kill(os.getpid(), 9)\n"
    kill = after(line("    scheduler.step", text=LAUNCH), once, kill)
    folder = copy_script(tmp_path / "killed", "ddp_launch_train", SMALL_MODEL, kill)
    command = " ".join([block("restarts").strip().replace("per-node=gpu", "per-node=2"), *SMALL])
    finished = run(["bash", "-c", command], cwd=folder, PATH=f"{sys.prefix}/bin:{os.environ['PATH']}")
    assert ": 0 epochs are done" in finished.stdout and ": 1 epochs are done" in finished.stdout
    assert len([*folder.glob("logs/*/attempt_[01]/[01]/stdout.log")]) == 4
    assert finished.returncode == 0 and saved_by(folder) == saved_by(uninterrupted)


# Two processes of this machine stand for two machines.
HERE = {"per-node=gpu": "per-node=1", "_train.py": f"_train.py {' '.join(SMALL)}", "10.0.0.1": "127.0.0.1"}
SLURM = """scontrol() { echo 127.0.0.1; }
srun() { shift 2; SLURM_NODEID=1 "$@" & SLURM_NODEID=0 "$@" && wait $!; }
"""


@pytest.mark.parametrize("name", ["two machines", pytest.param("slurm", marks=pytest.mark.slow)])
def test_the_commands_for_several_machines_train_on_two(name, start, tmp_path):
    copy_script(tmp_path, "ddp_launch_train", SMALL_MODEL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    commands = SLURM + block(name).replace("eth0", "lo").replace("29500", port)
    for old, new in HERE.items():
        commands = commands.replace(old, new)
    settings = dict(SLURM_JOB_ID=port, SLURM_JOB_NODELIST="", SLURM_CPUS_PER_TASK="1", SLURM_NNODES="2")
    settings |= dict(PATH=f"{sys.prefix}/bin:{os.environ['PATH']}")
    if name == "two machines":
        start(["bash", "-c", commands.replace("node-rank=0", "node-rank=1")], "", cwd=tmp_path, **settings)
    assert result(run(["bash", "-c", commands], cwd=tmp_path, **settings))["world_size"] == 2
