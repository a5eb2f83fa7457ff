"""The pages with recipes: each block runs in one of our scripts, in one of minimal/, or in a small program."""

import ast
import os
import re
import shutil
import socket
import sys
from textwrap import dedent, indent

import PIL.Image
import pytest
import torch
from conftest import SMALL, in_group, in_processes, result, run, train, train_minimal
from editing import FLOAT64, ROOT, SCRIPTS, SMALL_MODEL, copy_script, edited
from pages import EMA, LANGUAGE_MODEL, LAUNCH, after, at, before, block, edits_of, line, pieces, said

import common

# The scripts that each diff fits.
FITS = {"our weights": SCRIPTS[1:], "our stopping": SCRIPTS}


def functions(*codes):
    """Return an edit that adds functions at the end of a script, where they replace those of the same name."""
    return "\nif __name__", "\n".join(["", *codes, "\nif __name__"])


def test_each_block_is_tested_and_each_link_leads_to_a_heading():
    tests = "".join(file.read_text() for file in (ROOT / "tests").glob("*.py"))
    pages = {page.stem: page.read_text() for page in ROOT.glob("*.md")}
    anchors = {}
    for page, text in pages.items():
        titles = re.findall("(?m)^###? (.*)", text)
        anchors[page] = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
    for page in pages.keys() - {"README"}:
        blocks = re.findall(r"<!-- test: (.*?) -->\n *```\w+\n", pages[page])
        assert len(blocks) == len(set(blocks)) == pages[page].count("```") / 2, page
        runs = r"""((block|pieces)\(|parametrize\("name", .*)["']{}["']"""  # a name alone runs nothing
        assert not [name for name in blocks if not re.search(runs.format(name), tests)], page
    for page, text in pages.items():
        for target, anchor in re.findall(r"(?:\(|\]: )(?:(\w+)\.md)?#([\w-]+)", text):
            assert anchor in anchors[target or page], (page, anchor)
    index = re.findall(r"\(#(.*?)\)", pages["RECIPES"].split("\n## ")[0])
    assert sorted(index) == sorted(anchors["RECIPES"])


@pytest.mark.parametrize("name", FITS)
def test_each_diff_fits_its_scripts(name, tmp_path):
    for script in FITS[name]:
        folder = copy_script(tmp_path, script, *edits_of(block(name)))
        compile((folder / f"{script}.py").read_text(), script, "exec")


# ------------------------------------------------------------ Losses: one gradient, in small programs
LOSS_PROGRAM = """
torch.set_default_dtype(torch.float64)
device, mine, class_weights = "cpu", slice(rank, None, world_size), torch.tensor([1.0, 5.0, 0.2, 3.0])
results = {}
for name, case in CASES.items():
    torch.manual_seed(1)
    scope = dict(globals())
    exec(case, scope)
    losses = [None] * world_size
    scope["loss"].backward()
    dist.all_gather_object(losses, scope["loss"].item())
    results[name] = torch.cat([weight.grad.flatten() for weight in scope["model"].parameters()]), losses
rank or torch.save(results, "results.pt")
"""
ROWS = """
model, images, labels = nn.Linear(6, 4), torch.randn(12, 6)[mine], torch.randint(4, (12,))[mine]
ddp_model = DDP(model)
"""
PIXELS = """
model, images, labels = nn.Conv2d(5, 4, 1), torch.randn(12, 5, 2, 3), torch.randint(4, (12, 2, 3))
labels[:2] = labels[torch.rand(labels.shape) < 0.3] = -100
images, labels, ddp_model = images[mine], labels[mine], DDP(model)
"""
WEIGHTED = "loss = nn.functional.cross_entropy(ddp_model(images), labels, class_weights)\n"
gathered = [("ddp_model(images)", "gather(ddp_model(images))"), ("labels", "gather(labels)")]
SMOOTHED = WEIGHTED.replace("weights)", "weights, label_smoothing=0.1)")
VIEWS = f"{ROWS}view_1, view_2 = images, images.flip(1)\n"
# Four texts for each rank but the last, which has the others.
TEXTS = """
lengths, x, targets = torch.randint(1, 5, (12,)), torch.randn(20, 12, 6), torch.randint(1, 4, (12, 5))
own = slice(4 * rank, 12 if rank == world_size - 1 else 4 * rank + 4)
lengths, x, targets, frames = lengths[own], x[:, own], targets[own], torch.full((12,), 20)[own]
ddp_model = DDP(model := nn.Linear(6, 4))
log_probs = ddp_model(x).log_softmax(2)
"""
MODEL, method = pieces("methods")
MODEL = f"""{ROWS}{MODEL}    def training_loss(self, images, labels):
        return nn.functional.cross_entropy(self.layer(images), labels)
model = Model()
model.layer = nn.Linear(6, 4)
ddp_model = DDP(model)
"""
CTC = "loss = nn.functional.ctc_loss(log_probs, targets, frames, lengths)\n"
ADVANTAGES = "advantages = (advantages - of_all.mean()) / (of_all.std() + 1e-8)"
POLICY = f"{ROWS}advantages = torch.randn(12)[mine]\nof_all = advantages\n"
LOSS_OF_POLICY = "\nloss = -(advantages * ddp_model(images).log_softmax(1)[:, 0]).mean()\n"
advantages = said("of_all = gather(advantages)") + "\n" + said(ADVANTAGES) + LOSS_OF_POLICY
weighted_mean = block("weighted mean").replace('="sum"', '="sum", label_smoothing=0.1')
line_of_weights = "weights = class_weights[labels.where(known, 0)] * known", said("weights = known")
ignored_mean = edited(block("weighted mean"), line_of_weights, (", class_weights, red", ", red"))
IGNORED_LABELS = "loss = nn.functional.cross_entropy(ddp_model(images), labels)\n"
MAPS = f"""{PIXELS}probabilities = ddp_model(images).softmax(1)
targets = nn.functional.one_hot(labels.clamp(min=0), 4).movedim(3, 1)
"""
# Name: what stands before both, the ordinary code for one process, the recipe.
LOSSES = {
    "class weights, gathered": (PIXELS, WEIGHTED, edited(WEIGHTED, *gathered)),
    "ignored labels": (PIXELS, IGNORED_LABELS, ignored_mean),
    "class weights and smoothing": (PIXELS, SMOOTHED, weighted_mean),
    "Dice": (MAPS, block("Dice").replace("sum_over_all(", "("), block("Dice")),
    "two views": (VIEWS, block("two views").replace("gather(", "("), block("two views")),
    "CTC": (TEXTS, CTC, pieces("unequal batches")[1]),
    "advantages": (POLICY, ADVANTAGES + LOSS_OF_POLICY, advantages),
    "methods": (MODEL, "loss = model.training_loss(images, labels)\n", method),
}


def test_the_gradient_of_each_loss_is_that_of_one_process(tmp_path):
    runs = {}  # (1 for the ordinary code or 2 for the recipe, number of processes): name: gradient and losses
    for number, nproc in (1, 1), (1, 2), (2, 1), (2, 2), (2, 3):
        cases = {name: case[0] + case[number] for name, case in LOSSES.items()}
        in_group(nproc, tmp_path, f"from helpers import gather, sum_over_all\nCASES = {cases!r}\n{LOSS_PROGRAM}")
        runs[number, nproc] = torch.load(tmp_path / "results.pt")
    for name in LOSSES:
        expected, [loss] = runs[1, 1][name]
        for nproc in 1, 2, 3:
            gradient, losses = runs[2, nproc][name]
            assert (gradient - expected).norm() < 1e-12 * expected.norm(), (name, nproc)
            assert sum(losses) / nproc == pytest.approx(loss, rel=1e-12), (name, nproc)
        wrong, _ = runs[1, 2][name]
        assert (wrong - expected).norm() > 1e-3 * expected.norm(), name  # so the recipe is needed


# ------------------------------------------------------------ Trainings: the same weights on 1, 2 and 3 processes
LAYERS = "nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 10)"
DROPOUT = ("nn.Tanh()", "nn.Dropout(0.1)")
ADAMW = line("optimizer = ")
SGD = "    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)\n"
EXACT = [  # edits of minimal/ddp.py: float64, and no BatchNorm
    functions("import contextlib, glob, itertools, shutil\ntorch.set_default_dtype(torch.float64)\n"),
    ("batch_size = 512", "batch_size = 12"),
    ("models.resnet50(num_classes=10)", f"nn.Sequential(nn.Flatten(), {LAYERS})"),
    (ADAMW, SGD),  # AdamW would not see a wrong factor
]
EPOCHS, SET_EPOCH, LOOP = line("    for epoch in"), line("set_epoch"), line("in train_loader", 2)
LOSS, STEP = line("loss = nn"), line("optimizer.zero_grad", 3)
SAMPLER, WRAPPED = line("= DistributedS"), line("= DDP")
OUR_SAMPLER, OUR_LOADER = line("= DistributedS", text=LAUNCH), line("train_loader = DataL", text=LAUNCH)
LOSS_AND_STEP = dedent(LOSS + STEP)
# The labels 0 to 3 are ignored, and the others have different weights.
OURS_LABELLED = after(line(r"tensor.to\(device", text=LAUNCH), "labels = labels.where(labels > 3, -100)\n")
WEIGHTS = "torch.arange(1, 11).double()"
OUR_WEIGHTS = [OURS_LABELLED, *edits_of(block("our weights").replace("torch.ones(10, device=device)", WEIGHTS))]
ours_ordinary = OURS_LABELLED, ("outputs.float(), labels)", f"outputs.float(), labels, {WEIGHTS})")
OUR_SAMPLING = [at(OUR_SAMPLER, block("weighted sampler"))]
ORDER = "torch.randperm(60, generator=torch.Generator().manual_seed(epoch)).tolist()"
OF_STREAM = [
    at(SAMPLER, f"items = train_set\nread = lambda epoch: (items[i] for i in {ORDER})\n"),
    at(line("train_loader = Data"), block("stream").replace("50_000", "60")),
    ("sampler.set_epoch(epoch)", said("train_set.epoch = epoch")),
]
in_parts = block("accumulation").replace("32", "4")
count_labels = said("total = (labels != -100).sum().to(device)") + "\ndist.all_reduce(total)\n"
divided = "loss / len(labels)", said("(world_size * loss / total).backward()").removesuffix(".backward()")
sums_in_parts = edited(in_parts, ("optimizer.zero_grad()\n", f"{count_labels}optimizer.zero_grad()\n"), divided)
in_parts, sums_in_parts = (dedent(line("in train_loader")) + indent(c, "    ") for c in (in_parts, sums_in_parts))
IGNORED = after(line("in train_loader"), "    labels = labels.where(labels > 3, -100)\n")
bfloat16 = block("bfloat16").replace('"cuda", torch.bfloat16', '"cpu", enabled=False').replace(".float()", "")
# Both unfreeze the first layer in the second epoch.
FIND_UNUSED = ("DDP(model)", said("DDP(model, find_unused_parameters=True)"))
UNFREEZE = after(SET_EPOCH, "model[1].requires_grad_(epoch >= 1)\n")
wrap_again = block("wrapping again").replace("conv1", "get_submodule('1')").replace("= 2", "= 1")
FROZEN = before(WRAPPED, "model[1].requires_grad_(False)\n")
WITHOUT_DDP = [at(WRAPPED, "ddp_model = model\n"), UNFREEZE]
[by_hand] = re.findall("```python\n(for weight in .*?)```", (ROOT / "README.md").read_text(), re.S)
TEN_STEPS = [("steps, every = 20_000, 1000", "steps, every = 10, 3"), ("pct_start=0.1", "pct_start=0.3")]
OF_EMA = [(SGD, ADAMW), *EMA, (ADAMW, SGD)]

TEXT_DATA = """
def load_data(args):
    random = torch.Generator().manual_seed(1)
    texts = [torch.randint(1, 9, (n,), generator=random) for n in torch.randint(2, 40, (61,), generator=random)]
    items = [{} for words in texts]
    return items, items
"""
# A convolution and a mean that see the padding where the mask is 1.
TEXT_MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.conv, self.out = nn.Embedding(9, 8), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 10)
    def forward(self, words, mask):
        mask = mask[..., None]
        hidden = self.conv((self.words(words) * mask).mT).relu().mT
        return self.out((hidden * mask).sum(1) / mask.sum(1))

def build_model(args):
    return Net().double()
"""
import_buckets, use_of_buckets = block("buckets").split("\n\n")
collate = """
def collate(items):  # items are (tensor of words, label)
    words, labels = zip(*items)
    lengths = torch.tensor([len(text) for text in words])
    return nn.utils.rnn.pad_sequence(words, batch_first=True), lengths, torch.tensor(labels)
"""
mask = said("mask = torch.arange(words.shape[1], device=device) < lengths[:, None]") + "\n"
BATCH = "words, lengths, labels = (tensor.to(device) for tensor in batch)"
BATCH = f"{BATCH}\nimages = torch.zeros(1)  # not used\n"
# Our script trains with texts in buckets, and masks the padding.
WITH_TEXTS = [
    at(OUR_SAMPLER, "sampler = Buckets([len(words) for words, _ in train_set], args.batch_size, args.seed)\n"),
    at(OUR_LOADER, "train_loader = DataLoader(train_set, batch_sampler=sampler, **options)\n"),
    functions(import_buckets, collate, TEXT_DATA.format("(words, len(words) % 10)"), TEXT_MODEL),
    at(line(r"tensor.to\(device", text=LAUNCH), BATCH, mask),
    ("outputs = model(images)", "outputs = model(words, mask)"),
]

# What the page uses of transformers and peft. (With the libraries themselves, it was tried by hand.)
HUB = """
from types import SimpleNamespace
import torch
from torch import nn
class LanguageModel(nn.Sequential):
    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=super().forward(input_ids))
    def save_pretrained(self, folder):
        torch.save(self.state_dict(), f"{folder}.pt")
class BatchEncoding(dict):
    def to(self, device):
        return self
def tokenizer(text, truncation):
    return dict(input_ids=torch.tensor([int(letter) for letter in text]))
tokenizer.eos_token, tokenizer.save_pretrained = "0", lambda folder: None
AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: tokenizer)
layers = lambda: (nn.Embedding(9, 8), nn.Tanh(), nn.Linear(8, 9))
AutoModelForCausalLM = SimpleNamespace(from_pretrained=lambda name: LanguageModel(*layers()))
LoraConfig = dict
get_peft_model = lambda model, config: (model[0].requires_grad_(False), model)[1]
def DataCollatorWithPadding(tokenizer):
    def collate(items):
        pad = lambda rows: nn.utils.rnn.pad_sequence(list(rows), True)
        batch = BatchEncoding(input_ids=pad(item["input_ids"] for item in items))
        batch["attention_mask"] = pad(torch.ones_like(item["input_ids"]) for item in items)
        if "labels" in items[0]:
            batch["labels"] = torch.tensor([item["labels"] for item in items])
        return batch
    return collate
class Classifier(LanguageModel):
    def forward(self, input_ids, attention_mask, labels):
        logits = self[1](self[0](input_ids).sum(1))
        return SimpleNamespace(logits=logits, loss=nn.functional.cross_entropy(logits, labels))
def classifier(name, num_labels):
    return Classifier(nn.Embedding(9, 8, padding_idx=0), nn.Linear(8, num_labels))
AutoModelForSequenceClassification = SimpleNamespace(from_pretrained=classifier)
"""
WANDB = """
def init(**_):
    print("INIT")
def log(values, step):
    print("LOG", values, step)
"""
TQDM = "tqdm = lambda items, disable: items if disable else (print('BAR'), items)[1]"
LIBRARIES = dict(transformers=HUB, peft=HUB, wandb=WANDB, tqdm=TQDM)  # stand-ins
HELPERS = (ROOT / "minimal" / "helpers.py").read_text()
FOR_TRAIN_MINIMAL = after("import os\n", "from torchvision import datasets\n")
OF_CLASSIFIER = [
    functions("torch.set_default_dtype(torch.float64)\n"),
    *(FOR_TRAIN_MINIMAL, ("AdamW", "SGD"), ("lr=2e-5", "lr=0.1"), ("32 //", "12 //")),
    ('Path(file).read_text().split("\\n")', "[f'{i % 2}\\t{\"12345678\"[i % 7 :]}' for i in range(60)]"),
]
OF_LANGUAGE_MODEL = [
    functions("torch.set_default_dtype(torch.float64)\n"),
    *(FOR_TRAIN_MINIMAL, ("AdamW", "SGD"), ("lr=2e-4", "lr=0.1"), ("32 //", "12 //")),
    *(('"cuda", torch.bfloat16', '"cpu", enabled=False'), (".float()", "")),
    ('Path(file).read_text().split("\\n")', "['12345678'[i % 7 :] for i in range(60)]"),
]
OWN_LOSS = [(re.search(" *dist.all_reduce.tokens.*\n", LANGUAGE_MODEL)[0], ""), ("world_size * loss", "loss")]

# One learning rate for all numbers of processes, and the global batch of the others.
HIGHER = ("max_lr=1e-3", said("max_lr=1e-3 * world_size**0.5").replace("world_size**", "4**"))
WARM_UP = [(SGD, ADAMW), *edits_of(edited(block("warm-up"), HIGHER)), (ADAMW, SGD)]
ten_steps = edited(block("warm-up"), ("10 * len(train_loader)", "10"), ("pct_start=0.1", "pct_start=0.3"))
IN_TEN_STEPS = [(SGD, ADAMW), *edits_of(ten_steps), (ADAMW, SGD)]
# Name: script, edits for the ordinary code of one process (None: there is none), edits for the recipe.
SAME = {
    "class weights": ("ddp_launch_train", ours_ordinary, OUR_WEIGHTS),
    "weighted sampling": ("ddp_launch_train", None, OUR_SAMPLING),
    "without DDP": ("minimal", [], [at(WRAPPED, "ddp_model = model\n"), after(line("loss.backward"), by_hand)]),
    "warm-up": ("minimal", None, WARM_UP),
    "IterableDataset": ("minimal", None, OF_STREAM),
    "steps": ("by_steps", IN_TEN_STEPS, [*EXACT, *TEN_STEPS]),  # as by ddp.py in two epochs of five steps
    "parts of batches": ("minimal", [], [at(LOOP + LOSS + STEP, in_parts)]),
    "parts with ignored labels": ("minimal", [IGNORED], [at(LOOP + LOSS + STEP, sums_in_parts), IGNORED]),
    "unfreezing": ("minimal", WITHOUT_DDP, [FIND_UNUSED, UNFREEZE]),
    "wrapping again": ("minimal", WITHOUT_DDP, [FROZEN, after(SET_EPOCH, wrap_again)]),
    "EMA": ("minimal", None, OF_EMA),
    "bfloat16": ("minimal", [], [at(LOSS, bfloat16)]),
    "masks": ("ddp_launch_train", None, WITH_TEXTS),
    "language model": ("language_model", [*OF_LANGUAGE_MODEL, *OWN_LOSS], OF_LANGUAGE_MODEL),
    "text classifier": ("text_classifier", None, OF_CLASSIFIER),
}
# Also the ordinary code.
RIGHT_ON_TWO = ["without DDP", "steps", "bfloat16", "parts of batches"]


def train_on(nproc, folder, script, edits, epochs=2):
    """Train an edited script from new. Return how the run ended, and its weights (None if it failed)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    [(folder / f"{library}.py").write_text(code) for library, code in (LIBRARIES | {"helpers": HELPERS}).items()]
    if script == "ddp_launch_train":
        copy_script(folder, script, *edits, *FLOAT64)
        finished = train(folder, nproc, "--batch-size", "18")
        return finished, None if finished.returncode else torch.load(folder / "run.pt")["model"]
    edits, name = (edits, script) if script != "minimal" else ([*EXACT, *edits], "ddp")
    finished = train_minimal(nproc, folder, *edits, epochs=epochs, images=60, name=name)
    if finished.returncode:
        return finished, None
    state = torch.load(max(folder.glob("[acmr]*.pt")))  # adapters.pt, classifier.pt, model.pt, or run.pt
    return finished, state.get("model", state)


def equal(weights, expected):
    """Return whether weights are the same but for rounding, in float64."""
    return all(torch.allclose(weights[name], expected[name], rtol=1e-12, atol=1e-12) for name in expected)


@pytest.mark.parametrize("name", SAME)
def test_1_2_and_3_processes_end_with_the_same_weights(name, tmp_path):
    script, ordinary, recipe = SAME[name]
    first = script.replace("by_steps", "minimal")
    _, expected = train_on(1, tmp_path / "run", first, recipe if ordinary is None else ordinary)
    printed = set()
    for nproc in 1, 2, 3:
        finished, weights = train_on(nproc, tmp_path / "run", script, recipe)
        assert equal(weights, expected), nproc
        lines = re.findall(r"(?:epoch|step) \d+ (?:train_loss|loss|accuracy) .*", finished.stdout)
        printed.add(tuple(line.partition(" images_per_second")[0] for line in lines))
    assert len(printed) == 1 and () not in printed  # so metrics do not depend on the number of processes, either
    if ordinary is not None and name not in RIGHT_ON_TWO:
        _, weights = train_on(2, tmp_path / "run", script, ordinary)
        assert weights is None or not equal(weights, expected)  # so the recipe is needed


def test_the_language_model_learns_where_texts_end(tmp_path):
    say = after(line(r"all_reduce\(sums", text=LANGUAGE_MODEL), "print('TOKENS', int(sums[1]))\n")
    finished, _ = train_on(1, tmp_path, "language_model", [*OF_LANGUAGE_MODEL, say])
    count = sum(8 - i % 7 for i in range(60))  # each token but the first, and one at the end
    assert finished.stdout.count(f"TOKENS {count}\n") == 3


def test_a_resumed_run_is_that_of_an_uninterrupted_one_and_other_settings_end_it(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    resume = edits_of(block("resuming"), block("stop"))
    parts.mkdir()
    for number, (folder, env) in enumerate([(whole, {}), (parts, dict(STOP="1")), (parts, {})], 1):
        finished = train_minimal(2, folder, *resume, *EXACT, DROPOUT, epochs=3, images=60, **env)
        assert finished.returncode == 0 and finished.stdout.count("accuracy") == {1: 3, 2: 1, 3: 2}[number]
        shutil.copy(folder / "run.pt", parts / f"{number}")
    commands = block("check a resume").replace("python", sys.executable)
    commands = "torchrun() { cp $((++runs)) run.pt; }\n" + commands
    assert "checks: the files are the same" in run(["bash", "-c", commands], cwd=parts).stdout
    (parts / "empty").mkdir()
    lacks_it = after(line("world_size = int"), "os.chdir('empty' if rank else '.')\n")  # on another machine
    finished = train_minimal(2, parts, *resume, *EXACT, lacks_it, epochs=4, images=60)
    assert finished.returncode != 0 and """in 'done', "done": 0 but "done": """ in finished.stdout
    finished = train_minimal(3, parts, *resume, *EXACT, images=48)
    assert finished.returncode != 0 and "the file has {'images': 60, 'batch': 12, 'steps': 5," in finished.stdout


def test_a_loop_by_steps_resumes_within_an_epoch_also_with_workers(tmp_path):
    def weights_of(folder, *edits):
        loader = ("=batches, num_workers=8", "=batches, num_workers=2, multiprocessing_context='fork'")
        edits = *TEN_STEPS, ("= 10, 3", "= 14, 3"), loader, *edits, *EXACT, DROPOUT
        assert train_minimal(2, folder, *edits, images=60, name="by_steps").returncode == 0
        return torch.load(folder / "run.pt")["model"]

    expected = weights_of(tmp_path / "whole")
    assert {path.name for path in tmp_path.glob("whole/step*")} == {f"step-{n}.pt" for n in (9, 12, 14)}
    stop = ("range(done, steps, every)", "range(done, 8, every)")
    assert not equal(weights_of(tmp_path / "parts", stop), expected)
    for _ in "resumed", "finished":
        assert equal(weights_of(tmp_path / "parts"), expected)


def images_and_labels():
    """Return the validation images of our scripts with SMALL, as the model sees them, and their labels."""
    images, labels = zip(*common.load_cifar10(None, 61)[1])
    return common.prepare(torch.stack(images), 4), torch.tensor(labels)


def test_a_weighted_loss_is_that_of_all_images(tmp_path):
    metrics = result(train(copy_script(tmp_path, "ddp_launch_train", *OUR_WEIGHTS, *FLOAT64), 2))
    model = eval(FLOAT64[0][1], vars(torch))
    model.load_state_dict(torch.load(tmp_path / "run.pt")["model"])
    images, labels = images_and_labels()
    known = labels > 3
    scores = model(images.double())[known]
    loss = torch.nn.functional.cross_entropy(scores, labels[known], torch.arange(1, 11).double())
    assert metrics["val_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["val_accuracy"] == pytest.approx((scores.argmax(1) == labels[known]).double().mean().item())


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_gathered_rows_are_in_the_order_of_the_dataset(nproc, tmp_path):
    own = "torch.arange(8)[rank::world_size]"
    program = f"from helpers import gather_rows\nprint(f'{{[*map(int, gather_rows({own}))]}}\\n', end='')"
    assert in_group(nproc, tmp_path, program) == f"{[*range(8)]}\n" * nproc
    own = "counts = [*range(1, 8)][rank::world_size]\noutputs = torch.cat([torch.full((n,), n) for n in counts])"
    add, join = "rows += [item.clone() for item in outputs.cpu().split(counts)]", "torch.cat(gather_rows(rows))"
    assert add in HELPERS and join in HELPERS
    own += "\nrows = []"
    small = "assert all(row.untyped_storage().nbytes() == 8 * len(row) for row in rows)"
    program = f"from helpers import gather_rows\n{own}\n{add}\n{small}\nprint(f'{{{join}.tolist()}}\\n', end='')"
    assert in_group(nproc, tmp_path, program) == f"{[n for n in range(1, 8) for _ in range(n)]}\n" * nproc
    words = "from helpers import *\ntry: gather_rows(torch.zeros(3 - 2 * rank))\nexcept ValueError as e: print(e)"
    if nproc == 2:  # three words in the image of rank 0, and one in that of rank 1
        assert in_group(2, tmp_path, words).count("the ranks have [3, 1] rows, so these are not one for each") == 2


def test_rank_0_alone_logs_the_loss_of_all_ranks(tmp_path):
    bar = ("in train_loader:", f"in tqdm.{said('tqdm(train_loader, disable=rank != 0)')}:")
    edits = [*edits_of(block("metrics"), block("logging")), bar, ("import wandb\n", "import tqdm, wandb\n")]
    edits += [("wandb.log(dict(", "wandb.log(dict(f1=f1.item(), auc=auc.item(), ")]
    losses = []
    for nproc in 1, 2, 3:
        finished, _ = train_on(nproc, tmp_path / "run", "minimal", edits)
        counts = [len(re.findall(f"(?m)^{word}", finished.stdout)) for word in ("INIT", "BAR", "LOG", "epoch")]
        assert finished.returncode == 0 and counts == [1, 2, 2, 2]
        losses += map(ast.literal_eval, re.findall("LOG ({.*}) 1", finished.stdout))
    assert len(losses) == 3 and losses == [pytest.approx(losses[0], rel=1e-12)] * 3


def test_rank_0_of_our_scripts_alone_logs_with_wandb(tmp_path):
    init, log = (f"if rank == 0: {said(f'wandb.{call}', 'SCRIPTS')}\n" for call in (
        'init(project="cifar10")', "log(epoch_metrics, step=epoch)"))
    loop, end = line("for epoch in", text=LAUNCH), line("if epoch == epochs_done", text=LAUNCH)
    edits = [("import common\n", "import common\nimport wandb\n"), before(loop, init), before(end, log)]
    finished, _ = train_on(2, tmp_path, "ddp_launch_train", edits)
    assert finished.stdout.count("INIT") == 1 and finished.stdout.count("LOG {'train_loss'") == 2


def test_steps_are_timed_with_the_loader_and_on_one_batch(tmp_path):
    no_checks = line("same_weights"), ""
    timing = block("timing").replace("torch.cuda.synchronize()", "pass").replace("...  # the", f"{LOSS_AND_STEP}#")
    timing = timing.replace(LOSS_AND_STEP, indent(LOSS_AND_STEP, " " * 8).strip() + "\n")
    edits = [*EXACT, before(EPOCHS, "import time\n", timing), no_checks]
    finished = train_minimal(2, tmp_path, *edits, epochs=1, images=60)
    assert finished.returncode == 0 and finished.stdout.count(" s without the exchange") == 2


def test_the_weights_of_a_compiled_average_of_a_model_load_without_their_prefixes():
    model = torch.nn.Linear(2, 2)
    state = torch.compile(torch.optim.swa_utils.AveragedModel(model)).state_dict()
    exec(block("prefixes"), scope := dict(state=state))
    model.load_state_dict(scope["state"])


def test_all_processes_stop_early_in_one_epoch_also_when_the_command_is_repeated(tmp_path):
    copy_script(tmp_path, "ddp_launch_train", *edits_of(block("our stopping")), *FLOAT64)
    first, again = (train(tmp_path, 2, "--lr", "1e-9", "--epochs", "9") for _ in range(2))
    assert first.stdout.count(" train_loss ") == 6 and " train_loss " not in again.stdout
    assert result(first) == result(again)
    edits = [(SGD, ADAMW), *edits_of(block("stopping"), block("every n steps").replace("200", "7"))]
    edits += [(ADAMW, SGD.replace("0.1", "0.0"))]
    decided = "checks.same_on_all_ranks(dict(bad_epochs=bad_epochs))\n"
    edits += [('torch.save(model.state_dict(), "model.pt")', 'print("best")'), before(line("7. Only"), decided)]
    finished = train_minimal(2, tmp_path, *EXACT, *edits, epochs=9, images=60)
    assert finished.stdout.count("best") == 1
    assert finished.returncode == 0 and len(re.findall("(?m)^epoch", finished.stdout)) == 6  # of 5 steps each
    assert {path.name for path in tmp_path.glob("step*")} == {f"step-{n}.pt" for n in (14, 21, 28)}


def test_classes_are_drawn_equally_often_and_buckets_have_each_item_once_and_similar_lengths():
    lengths, labels = torch.arange(500, 289, -1).tolist(), torch.tensor([0] * 900 + [1] * 100 + [2])
    scope = vars(torch.utils.data) | dict(torch=torch, train_set=[(None, label) for label in labels])
    of_one = ("(weights, seed", "(weights, 1, 0, seed"), ("(lengths, seed", "(lengths, 1, 0, seed")  # process
    exec(edited(HELPERS, *of_one) + block("weighted sampler").split("\n\n")[1], scope)
    sampler, buckets = scope["sampler"], scope["Buckets"](lengths, 24, 21)
    scope |= dict(nn=torch.nn, world_size=1, train_set=[(torch.ones(n), n) for n in lengths])
    exec(collate + "\n\n" + use_of_buckets.replace("512", "24").replace("=8", "=0"), scope)
    words, numbers, _ = next(iter(scope["train_loader"]))
    assert words.shape == (24, max(numbers)) and words.sum(1).tolist() == numbers.tolist()
    first = [*sampler], [*buckets]
    sampler.set_epoch(1), buckets.set_epoch(1)
    assert all(270 < count < 400 for count in labels[first[0]].bincount()) and [*sampler] != first[0]
    assert len(buckets) == 8 and len(set(sum(buckets, []))) == 192 and [*buckets] != first[1]
    assert all(max(batch) - min(batch) < 140 for batch in buckets)  # 24, 19 that are left out, and the noise
    scope |= dict(batches=[[2 * i, 2 * i + 1] for i in range(8)], world_size=3, rank=1)  # six of eight are used
    exec(pieces("unequal batches")[0], scope)
    assert [numbers.tolist() for _, numbers, _ in scope["train_loader"]] == [lengths[2:4], lengths[8:10]]
    full = scope["Buckets"](lengths[:192], 24, 21)  # leaves nothing out
    first = {frozenset(batch) for batch in full}
    full.set_epoch(1)
    assert not first & {frozenset(batch) for batch in full}  # other batches in each epoch, because of the noise


def test_a_stream_with_workers_yields_no_item_twice_and_equally_many_on_all_ranks(tmp_path):
    loader = edited(block("stream"), ("50_000", "71"), ("=8", "=2, multiprocessing_context='fork'"))
    program = f"""from torch.utils.data import DataLoader
read, batch_size = lambda epoch: iter(range(100 * epoch, 100 * epoch + 71)), 6
{loader}"""
    program += """
for epoch in 1, 2:
    train_set.epoch = epoch
    print(f"{[batch.tolist() for batch in train_loader]}\\n", end="")
"""
    ranks = [ast.literal_eval(batches) for batches in in_group(2, tmp_path, program).splitlines()]
    items = [item for batches in ranks for batch in batches for item in batch]
    assert [len(batches) for batches in ranks] == [4] * 4  # of 71: each of four workers has two batches of six
    assert len(set(items)) == len(items) == 96


def test_images_in_folders(tmp_path):
    for number in range(40):
        folder = tmp_path / ("val" if number % 4 == 0 else "train") / f"class {number % 5}"
        folder.mkdir(parents=True, exist_ok=True)
        PIL.Image.new("RGB", (20, 24 + number), (50 * (number % 5), 0, 0)).save(folder / f"{number}.png")
    classes = ("args.pretrained)  # channels_last", "args.pretrained, classes=5)  # channels_last")
    copy_script(tmp_path, "ddp_launch_train", functions(block("image folders")), classes)
    flags = "--data-dir . --image-size 8 --workers 1 --batch-size 10".split()
    right = 10 * result(train(tmp_path, 2, *flags))["val_accuracy"]  # of ten images
    assert right == pytest.approx(round(right))


def test_the_best_weights_of_our_scripts_give_the_best_metric(tmp_path):
    finished = train(copy_script(tmp_path, "ddp_launch_train", SMALL_MODEL), 2)
    images, labels = zip(*common.load_cifar10(None, 61)[1])
    torch.save(torch.stack(images), tmp_path / "images.pt")
    program = f"images = __import__('torch').load('images.pt')\n{block('evaluation')}\nprint(outputs.tolist())"
    (tmp_path / "evaluate.py").write_text(program)
    outputs = torch.tensor(ast.literal_eval(in_processes(0, tmp_path, "evaluate.py").stdout))
    accuracy = (outputs.argmax(1) == torch.tensor(labels)).double().mean().item()
    assert accuracy == pytest.approx(result(finished)["best"])


# Two processes of this machine stand for two machines.
HERE = {" train.py": " ddp_launch_train.py", "_train.py": f"_train.py {' '.join(SMALL)}"}
HERE |= {"per-node=gpu": "per-node=1", "10.0.0.1": "127.0.0.1"}
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
