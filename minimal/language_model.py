"""Fine-tune GPT-2 with adapters (LoRA) on texts, with all GPUs.

pip install transformers peft
torchrun --standalone --nproc-per-node=gpu minimal/language_model.py

Each line of train.txt and val.txt is a text. The steps are those of ddp.py; what differs is the
model, the data, and the loss, which counts tokens.
"""

import os
from pathlib import Path

import checks  # checks.py, beside this file
import torch
import torch.distributed as dist
from filelock import FileLock  # installed with PyTorch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithPadding


def load_texts(file, tokenizer):
    """Return a list of dicts, which have the tokens of a text."""
    texts = [text for text in Path(file).read_text().split("\n") if text]
    return [tokenizer(text + tokenizer.eos_token, truncation=True) for text in texts]


def summed_loss(model, batch):
    """Return the sum of the losses of a batch's tokens, and the number of these tokens."""
    labels = batch["input_ids"].where(batch["attention_mask"] == 1, -100)  # ignores padding
    labels = labels[:, 1:]  # the label of a token is the next token
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(**batch).logits[:, :-1]
    loss = nn.functional.cross_entropy(logits.mT.float(), labels, reduction="sum")
    return loss, (labels != -100).sum()


def main():
    # 1. torchrun starts this script once per GPU and tells each process which one it is.
    rank = int(os.environ["RANK"])  # index of this process among all
    local_rank = int(os.environ["LOCAL_RANK"])  # index on its machine
    world_size = int(os.environ["WORLD_SIZE"])  # number of processes

    # 2. Each process uses its own GPU and connects to the others.
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)

    torch.manual_seed(21)  # the same adapters on all ranks
    with FileLock("hub.lock"):  # one process downloads while the others wait
        tokenizer = AutoTokenizer.from_pretrained("openai-community/gpt2")
        model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2")
    tokenizer.pad_token = tokenizer.eos_token  # GPT-2 has none for padding; see summed_loss
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM")).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)  # created after the adapters

    train_set, val_set = load_texts("train.txt", tokenizer), load_texts("val.txt", tokenizer)
    collate = DataCollatorWithPadding(tokenizer)  # pads to the longest text of the batch

    # 3. Each rank trains on its own share, and all together use about 32 texts per step.
    sampler = DistributedSampler(train_set, seed=21, drop_last=True)
    batch_size = 32 // world_size
    train_loader = DataLoader(train_set, batch_size, sampler=sampler, collate_fn=collate)
    val_share = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = DataLoader(val_share, batch_size, collate_fn=collate)

    # 4. Wrap the model.
    ddp_model = DDP(model)
    ddp_model.broadcast_buffers = False  # the model's buffers never change
    torch.manual_seed(21 + rank)  # dropout should differ between ranks

    for epoch in range(3):
        sampler.set_epoch(epoch)  # 5. Shuffle differently in each epoch.
        model.train()
        for batch in train_loader:
            loss, tokens = summed_loss(ddp_model, batch.to(device))
            dist.all_reduce(tokens)  # the sum over all ranks, which have different numbers
            optimizer.zero_grad()
            (world_size * loss / tokens).backward()  # DDP will divide by world_size
            optimizer.step()
        checks.same_weights(optimizer)  # ends the run if the weights of the ranks differ

        # 6. Each rank validates its share, with `model`.
        model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # of losses and tokens
        with torch.no_grad():
            for batch in val_loader:
                sums += torch.stack(summed_loss(model, batch.to(device)))
        dist.all_reduce(sums)

        # 7. Only rank 0 prints and saves.
        if rank == 0:
            print(f"epoch {epoch} loss {(sums[0] / sums[1]).item():.4f}")
            model.save_pretrained("adapters")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
