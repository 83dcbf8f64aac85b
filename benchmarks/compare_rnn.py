"""Test the textbook's claim that the Transformer's epochs are faster than those of a recurrent sequence-to-sequence
model with attention, and that it converges faster early on.

    python benchmarks/compare_rnn.py --out results

Three models learn the same task (English number names to German ones) from the same batches in the same order, with
the recipe of the chapter: 2 blocks or layers, hidden 32, 4 heads, ffn 64, dropout 0.1, Adam with lr 0.005, gradients
clipped at 1. The recurrent model is two GRUs with additive attention (Bahdanau, Cho and Bengio, 2015). The Transformer
runs once in eager PyTorch and once on the fused ops. The models take turns after each epoch, on one thread; time is
CPU time of the process. At the end each model spells unseen numbers greedily; "exact" is the share without a mistake.

The table is printed. OUT gets compare_rnn.json.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import records
import torch
from torch import Tensor, nn

from transformer_fast.dialects import d2l
from transformer_fast.reference.dialects import d2l as eager
from transformer_fast.translation.numbers import english, german, sample_numbers
from transformer_fast.translation.tokenizer import BOS, EOS, PAD, Tokenizer

LAYERS, HEADS, DROPOUT = 2, 4, 0.1


class RecurrentEncoder(nn.Module):
    """ids (B, L) -> outputs (B, L, hidden) and the last hidden states (layers, B, hidden)."""

    def __init__(self, vocab: int, hidden: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.rnn = nn.GRU(hidden, hidden, LAYERS, dropout=DROPOUT, batch_first=True)

    def forward(self, X: Tensor, valid_lens: Tensor) -> tuple[Tensor, Tensor]:
        return self.rnn(self.embedding(X))


class RecurrentDecoder(nn.Module):
    """GRU that reads the source by attention at every step; its last hidden state is the query."""

    def __init__(self, vocab: int, hidden: int):
        super().__init__()
        self.attention = eager.AdditiveAttention(hidden, DROPOUT, query_size=hidden, key_size=hidden)
        self.embedding = nn.Embedding(vocab, hidden)
        self.rnn = nn.GRU(2 * hidden, hidden, LAYERS, dropout=DROPOUT, batch_first=True)
        self.dense = nn.Linear(hidden, vocab)

    def init_state(self, enc_outputs: tuple[Tensor, Tensor], valid_lens: Tensor) -> list:
        return [enc_outputs[0], enc_outputs[1].contiguous(), valid_lens]

    def forward(self, X: Tensor, state: list) -> tuple[Tensor, list]:
        memory, hidden, valid_lens = state
        outputs = []
        for x in self.embedding(X).unbind(1):
            context = self.attention(hidden[-1].unsqueeze(1), memory, memory, valid_lens)
            out, hidden = self.rnn(torch.cat((context, x.unsqueeze(1)), dim=-1), hidden)
            outputs.append(out)
        return self.dense(torch.cat(outputs, dim=1)), [memory, hidden, valid_lens]


def make_models(vocab: int, hidden: int, seed: int) -> dict[str, nn.Module]:
    """Return the models; both Transformers start from the same weights."""
    torch.manual_seed(seed)
    sizes = (vocab, hidden, 2 * hidden, HEADS, LAYERS, DROPOUT)
    models = {
        "GRU with attention": d2l.EncoderDecoder(RecurrentEncoder(vocab, hidden), RecurrentDecoder(vocab, hidden)),
        "Transformer, eager": eager.EncoderDecoder(eager.TransformerEncoder(*sizes), eager.TransformerDecoder(*sizes)),
        "Transformer, transformer_fast": d2l.EncoderDecoder(
            d2l.TransformerEncoder(*sizes), d2l.TransformerDecoder(*sizes)
        ),
    }
    for name, model in models.items():
        for parameter in model.parameters():
            if parameter.dim() > 1 and "eager" not in name:
                nn.init.xavier_uniform_(parameter)
    models["Transformer, eager"].load_state_dict(models["Transformer, transformer_fast"].state_dict())
    return models


def make_batches(tokenizer: Tokenizer, numbers: list[int], size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Source (B, L), its lengths (B,) and target with BOS and EOS (B, T), padded with 0."""
    sources = [torch.tensor(ids) for ids in tokenizer.encode_source([english(n) for n in numbers])]
    targets = [torch.tensor([BOS, *ids, EOS]) for ids in tokenizer.encode([german(n) for n in numbers])]
    batches = []
    for start in range(0, len(numbers), size):
        part = slice(start, start + size)
        src, trg = (nn.utils.rnn.pad_sequence(side[part], True, PAD) for side in (sources, targets))
        batches.append((src, torch.tensor([len(ids) for ids in sources[part]]), trg))
    return batches


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list, order: list[int]) -> float:
    """Train one epoch; return the loss per token."""
    total = tokens = 0.0
    model.train()
    for index in order:
        src, lengths, trg = batches[index]
        logits, _ = model(src, trg[:, :-1], lengths)
        wanted = trg[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        count = float((wanted != PAD).sum())
        total, tokens = total + loss.item() * count, tokens + count
    return total / tokens


@torch.inference_mode()
def exact(model: nn.Module, tokenizer: Tokenizer, numbers: list[int]) -> float:
    """Return the share of numbers that greedy decoding, step by step through the state, spells without a mistake."""
    model.eval()
    right = 0
    for (src, lengths, trg), start in zip(make_batches(tokenizer, numbers, 64), range(0, len(numbers), 64)):
        state = model.decoder.init_state(model.encoder(src, lengths), lengths)
        token, written = torch.full((src.shape[0], 1), BOS), []
        for _ in range(trg.shape[1] + 5):
            logits, state = model.decoder(token, state)
            token = logits.argmax(-1)
            written.append(token)
        spelled = tokenizer.decode(torch.cat(written, 1).tolist())
        right += sum(text == german(n) for text, n in zip(spelled, numbers[start : start + 64]))
    return right / len(numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--epochs", type=int, default=30, help="training epochs")
    parser.add_argument("--train-size", type=int, default=2000, help="number of training pairs")
    parser.add_argument("--hidden", type=int, default=32, help="width of the models")
    parser.add_argument("--batch", type=int, default=64, help="sentences per batch")
    parser.add_argument("--lr", type=float, default=0.005, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches")
    args = parser.parse_args()
    torch.set_num_threads(1)

    numbers, unseen = (
        sample_numbers(n, held_out=h, seed=args.seed) for n, h in ((args.train_size, False), (256, True))
    )
    tokenizer = Tokenizer.train([spell(n) for n in numbers for spell in (english, german)], vocab_size=200)
    models = make_models(len(tokenizer), args.hidden, args.seed)
    optimizers = {name: torch.optim.Adam(model.parameters(), args.lr) for name, model in models.items()}
    # Neighbours in length share a batch; which batch comes when is drawn anew for each epoch, the same for all.
    batches = make_batches(tokenizer, sorted(numbers, key=lambda n: len(english(n))), args.batch)
    rows = {name: {"epoch_seconds": [], "losses": []} for name in models}
    for epoch in range(args.epochs):
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(epoch)).tolist()
        for name, model in models.items():
            started = time.process_time()
            rows[name]["losses"].append(round(train_epoch(model, optimizers[name], batches, order), 4))
            rows[name]["epoch_seconds"].append(round(time.process_time() - started, 3))

    print(f"{'':32}seconds an epoch   loss after {args.epochs // 6}, {args.epochs // 2}, {args.epochs} epochs   exact")
    for name, row in rows.items():
        row["median_epoch_seconds"] = sorted(row["epoch_seconds"])[args.epochs // 2]
        row["exact"] = exact(models[name], tokenizer, unseen)
        row["parameters"] = sum(p.numel() for p in models[name].parameters())
        losses = {n: row["losses"][n - 1] for n in (args.epochs // 6, args.epochs // 2, args.epochs)}
        row |= {f"loss_after_{n}_epochs": loss for n, loss in losses.items()}
        said = "   ".join(f"{loss:.3f}" for loss in losses.values())
        print(f"{name:32}{row['median_epoch_seconds']:16.2f}   {said:>36}   {row['exact']:.1%}")
    run = {
        "what": "same task, batches, optimizer and thread; seconds of the process; epochs in turns",
        "recipe": {key: value for key, value in vars(args).items() if key != "out"},
        "results": rows,
    }
    records.save(args.out / "compare_rnn.json", run)


if __name__ == "__main__":
    main()
