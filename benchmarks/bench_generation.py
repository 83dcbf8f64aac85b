"""Generation against the eager reference without a cache, Hugging Face's Marian and CTranslate2; models of one size.

The benchmark suite runs a small model. The figures of the base size take minutes:

    python benchmarks/bench_generation.py --size base --length 64 --batch 16 --search greedy beam

``--paths`` compares runs with and without one of PATHS, in CPU seconds, which other programs disturb less. Use one
thread there, because waiting threads count too.

Each side runs in its own process (apart.py). All answers have exactly ``length`` tokens. Ours, the reference and
CTranslate2 have the same weights, and their answers are compared before anything is timed. Weights are laid out for
decoding before timing, in ours as in CTranslate2. Marian has random weights of the same sizes (post-norm). On a CPU,
ours and CTranslate2 also run with int8 weights, and each is compared with the other's side of the same weights. BLEU of
answers is against ours in fp32; with random weights many tokens are nearly tied, so it is low for both.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import records
import torch
from apart import Apart, from_thread_that_ends
from torch import Tensor

import transformer_fast as tfast
from transformer_fast.generation import decoding, weights
from transformer_fast.reference import layers as reference

SMALL_CASE = "test_generation[cpu-greedy-b1-l16]"
VOCAB, PAD, BOS, EOS, BEAM = 8000, 0, 2, 3, 5

Side = Callable[[Tensor], list[list[int]]]


class Size(NamedTuple):
    """Sizes of a model; the encoder and the decoder have ``layers`` each."""

    d_model: int
    layers: int
    heads: int
    d_ff: int


SIZES = {"small": Size(256, 3, 4, 1024), "base": Size(512, 6, 8, 2048)}


class Case(NamedTuple):
    """A case: ``search`` is "greedy" or "beam", ``length`` tokens are read and generated."""

    size: str
    search: str
    batch: int
    length: int


SIDES = ("ours", "eager uncached", "Marian", "CTranslate2", "ours int8", "CTranslate2 int8")
PATHS = {
    "the cache": "ours",
    "several steps in a call": "ours",
    "fused steps": "ours",
    "packed weights": "ours",
    "kept weights": "ours",
    "kept weights of int8": "ours int8",
}
"""Fast paths, each with the side that it is left out of."""


def ways(case: Case, device: str, uncached: bool = True, paths: bool = False) -> dict[str, Side]:
    """Every side by name: source ids (batch, length) -> answers. One that is not installed raises RuntimeError. On
    a CPU each is a process of its own, to be closed. With ``paths`` the sides are ours, and ours without each path."""
    left_out = [] if uncached else ["eager uncached"]
    if device != "cpu":
        left_out += ["ours int8", "CTranslate2 int8"]
    names = [name for name in SIDES if name not in left_out]
    if paths:
        names = [name for name in names if name.startswith("ours")] + [f"without {path}" for path in PATHS]
    if device != "cpu":
        return {name: make_side(name, case, device) for name in names}
    threads = torch.get_num_threads()
    # PyTorch only makes the weights of CTranslate2's model.
    return {
        name: Apart(
            make_timed_side if paths else make_side,
            name,
            case,
            device,
            threads,
            threads=1 if name.startswith("CTranslate2") else threads,
        )
        for name in names
    }


def close(sides: dict[str, Side]) -> None:
    """End the processes of :func:`ways`."""
    for side in sides.values():
        if isinstance(side, Apart):
            side.close()


def make_side(name: str, case: Case, device: str, threads: int | None = None) -> Side:
    """One of SIDES, in this process. threads: CTranslate2's."""
    size = SIZES[case.size]
    beam = 1 if case.search == "greedy" else BEAM
    if name == "Marian":
        return marian(size, beam, case.length, device)
    torch.manual_seed(0)
    sizes = VOCAB, VOCAB, size.d_model, size.layers, size.heads, 0.0
    slow = reference.Transformer(*sizes, d_ff=size.d_ff, norm="layer").to(device).eval()
    with torch.no_grad():  # further from ties than fresh weights are, and never an end
        slow.out.weight.mul_(8)
        slow.out.bias[EOS] = -1e4
    path, name = name.removeprefix("without "), PATHS.get(name.removeprefix("without "), name)
    quantize = "int8" if is_int8(name) else None
    if name.startswith("CTranslate2"):
        return ctranslate2(slow, size, case, "int8_float32" if quantize else "float32", threads or 0)
    model = slow
    if name != "eager uncached":
        model = tfast.Transformer(*sizes, d_ff=size.d_ff, norm="layer").to(device).eval()
        model.load_state_dict(slow.state_dict())
    model.requires_grad_(False)
    options = {"keep_weights": not path.startswith("kept weights"), "cache": path != "the cache"}
    leave_out(path)
    config = tfast.GenerationConfig(beam=beam, max_length=case.length, quantize=quantize, **options)
    return lambda src: [h[0].tokens for h in tfast.generate(model, src, bos=BOS, eos=EOS, config=config)]


def make_timed_side(name: str, case: Case, device: str, threads: int | None = None) -> Callable[[Tensor], Any]:
    """Return one of SIDES that returns the answers and the CPU seconds of the call."""
    side = make_side(name, case, device, threads)

    def run(src: Tensor) -> tuple[list[list[int]], float]:
        start = time.process_time()
        return side(src), time.process_time() - start

    return run


def leave_out(path: str) -> None:
    """Switch a path of PATHS off in this process, unless an option of the config does that."""
    if path == "several steps in a call":
        decoding.CachedDecoding.greedy = decoding.CachedDecoding.beam = lambda *_: None
    elif path == "fused steps":
        decoding.new_session = lambda *_: None
    elif path == "packed weights":
        weights.PrepackedLinear.operand = lambda *_: None


def marian(size: Size, beam: int, length: int, device: str) -> Side:
    """Hugging Face's Marian with random weights."""
    try:
        from transformers import MarianConfig, MarianMTModel
    except ImportError:
        return absent("transformers")
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", size.layers), ("attention_heads", size.heads), ("ffn_dim", size.d_ff))
    }
    marks = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS}
    config = MarianConfig(vocab_size=VOCAB, d_model=size.d_model, forced_eos_token_id=None, **sides, **marks)
    model = MarianMTModel(config).to(device).eval()
    lengths = {"min_new_tokens": length, "max_new_tokens": length}

    def run(src: Tensor) -> list[list[int]]:
        with torch.inference_mode():
            mask = torch.ones_like(src)
            return model.generate(src, attention_mask=mask, num_beams=beam, do_sample=False, **lengths)[:, 1:].tolist()

    return run


def absent(package: str) -> Side:
    """Return a side that raises, because a package is not installed."""

    def run(src: Tensor) -> list[list[int]]:
        raise RuntimeError(f"{package} is not installed")

    return run


def ctranslate2(model: torch.nn.Module, size: Size, case: Case, compute_type: str, threads: int) -> Side:
    """CTranslate2 with the weights of the reference."""
    try:
        import ctranslate2 as library
        from ctranslate2.specs import TransformerSpec
    except ImportError:
        return absent("ctranslate2")
    spec = TransformerSpec.from_config(size.layers, size.heads, pre_norm=True)
    for side, stack in ((spec.encoder, model.encoder), (spec.decoder, model.decoder)):
        embeddings = side.embeddings[0] if isinstance(side.embeddings, list) else side.embeddings
        embeddings.weight = array(stack.embed.lut.weight)
        side.scale_embeddings = True
        side.position_encodings.encodings = array(stack.pe.pe[0])
        fill(side.layer_norm, stack.norm, names=("gamma", "beta"))
        for to, layer in zip(side.layer, stack.layers, strict=True):
            own = layer.attn if side is spec.encoder else layer.attn_1
            fill(to.self_attention.linear[0], own.q_linear, own.k_linear, own.v_linear)
            fill(to.self_attention.linear[1], own.out)
            fill(to.self_attention.layer_norm, layer.norm_1, names=("gamma", "beta"))
            last = layer.norm_2
            if side is spec.decoder:
                fill(to.attention.linear[0], layer.attn_2.q_linear)
                fill(to.attention.linear[1], layer.attn_2.k_linear, layer.attn_2.v_linear)
                fill(to.attention.linear[2], layer.attn_2.out)
                fill(to.attention.layer_norm, layer.norm_2, names=("gamma", "beta"))
                last = layer.norm_3
            fill(to.ffn.linear_0, layer.ff.linear_1)
            fill(to.ffn.linear_1, layer.ff.linear_2)
            fill(to.ffn.layer_norm, last, names=("gamma", "beta"))
    fill(spec.decoder.projection, model.out)
    words = [str(token) for token in range(VOCAB)]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.bos_token = spec.config.decoder_start_token = str(BOS)
    spec.config.eos_token, spec.config.unk_token = str(EOS), str(PAD)
    spec.config.layer_norm_epsilon = 1e-5
    beam = 1 if case.search == "greedy" else BEAM
    options: dict[str, Any] = {"beam_size": beam, "max_decoding_length": case.length, "max_batch_size": 0}
    with tempfile.TemporaryDirectory() as folder:
        spec.validate()
        spec.save(folder)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        of_model: dict[str, Any] = {"device": device, "compute_type": compute_type, "intra_threads": threads}
        translator = from_thread_that_ends(lambda: library.Translator(folder, **of_model))

    def run(src: Tensor) -> list[list[int]]:
        rows = [[str(token) for token in ids] for ids in src.tolist()]
        found = translator.translate_batch(rows, min_decoding_length=case.length, **options)
        return [[int(word) for word in one.hypotheses[0]] for one in found]

    return run


def array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().numpy().copy()


def fill(spec: Any, *modules: torch.nn.Module, names: tuple[str, str] = ("weight", "bias")) -> None:
    """Weights and biases of modules, one below the other, into a layer's spec."""
    for to, part in zip(names, ("weight", "bias"), strict=True):
        setattr(spec, to, array(torch.cat([getattr(module, part) for module in modules])))


def is_int8(side: str) -> bool:
    return side.endswith("int8")


def sources(case: Case, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(4, VOCAB, (case.batch, case.length), generator=generator).to(device)


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of sentences with the same answer."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def bleu(answers: list[list[int]], expected: list[list[int]]) -> float:
    """BLEU of ids as words."""
    from transformer_fast.translation.evaluate import corpus_bleu

    said, wanted = ([" ".join(map(str, ids)) for ids in side] for side in (answers, expected))
    return corpus_bleu(said, wanted, tokenize="none").score


CASES = [Case("small", search, batch, 16) for search, batch in [("greedy", 1), ("greedy", 16), ("greedy", 64)]]
CASES += [Case("small", "beam", batch, 16) for batch in (1, 16)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.search}-b{case.batch}-l{case.length}")
def test_generation(versus, device, benchmark, case):
    if device != "cpu":
        pytest.skip("a search waits for the GPU at every step, so no graph can be timed: run this file as a program")
    uncached = case.batch * (1 if case.search == "greedy" else BEAM) <= 16  # a longer search takes seconds
    sides = ways(case, device, uncached)

    def check(src):
        if uncached:
            assert agreement(sides["ours"](src), sides["eager uncached"](src)) >= 0.9  # ties by rounding aside

    try:
        result = versus(lambda: sources(case, device), sides, check=check)
    finally:
        close(sides)
    said = case.batch * case.length
    benchmark.extra_info["tokens_per_second"] = {name: said / t.median for name, t in result.device.items()}


@dataclass(frozen=True)
class Result:
    """Result of one side in one case.

    Args:
        seconds: of each round.
        same, bleu: its answers against ours in fp32.
        refused: why it has none.
    """

    search: str
    batch: int
    side: str
    seconds: list[float]
    same: float | None = None
    bleu: float | None = None
    refused: str | None = None

    def row(self, ours: Result, length: int) -> str:
        """Row of the table. The fastest round counts, because disturbances only make a round slower."""
        cells = [self.search, str(self.batch), self.side]
        if self.refused is not None:
            return f"| {' | '.join([*cells, self.refused])} | | |"
        fastest = min(self.seconds)
        same = "" if self.same is None else f"{self.same:.0%}"
        same += "" if self.bleu is None else f", BLEU {self.bleu:.1f}"
        cells += [f"{self.batch * length / fastest:.0f}", f"{fastest / min(ours.seconds):.2f}", same]
        return f"| {' | '.join(cells)} |"


def compare(case: Case, device: str, rounds: int, uncached: bool, paths: bool = False) -> list[Result]:
    """Every side of a case; the sides take turns, and the first turn is not counted."""
    sides, src = ways(case, device, uncached, paths), sources(case, device)
    said: dict[str, list[list[int]]] = {}
    refused: dict[str, str] = {}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, call in sides.items():
            start = time.perf_counter()
            try:
                answers: Any = call(src)
            except RuntimeError as error:
                refused[name] = str(error)
                continue
            said[name], taken = answers if paths else (answers, time.perf_counter() - start)
            seconds[name].append(taken)
    close(sides)
    found = []
    for name, taken in seconds.items():
        same = None if name in ("ours", "Marian", *refused) else agreement(said["ours"], said[name])
        score = bleu(said[name], said["ours"]) if is_int8(name) and name not in refused else None
        found.append(Result(case.search, case.batch, name, taken[1:], same, score, refused.get(name)))
    return found


def main() -> None:
    """Print a table: tokens per second, and how many times faster ours is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="base", help="size of the model (default: base)")
    parser.add_argument("--length", type=int, default=64, help="tokens per answer (default: 64)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64], help="sentences (default: 1 16 64)")
    parser.add_argument("--search", nargs="+", choices=("greedy", "beam"), default=["greedy", "beam"])
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each side, in turn; the fastest counts")
    parser.add_argument("--no-uncached", action="store_true", help="skip the uncached reference, which takes minutes")
    parser.add_argument("--paths", action="store_true", help="compare with runs that have one fast path turned off")
    parser.add_argument("--out", type=Path, help="folder for bench_generation.json")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}, {args.size} {args.length}")
    print("| search | batch | side | tokens/s | ours is faster by | same answers |", "| --- " * 6 + "|", sep="\n")
    results: list[Result] = []
    for case in (Case(args.size, s, b, args.length) for s in args.search for b in args.batch):
        of_case = {
            result.side: result for result in compare(case, device, args.rounds, not args.no_uncached, args.paths)
        }
        for name, result in of_case.items():
            print(result.row(of_case["ours int8" if is_int8(name) else "ours"], args.length), flush=True)
        results += of_case.values()
    if args.out:
        run = {
            "what": f"sentences translated to answers of one length, in {'CPU ' * args.paths}seconds per round",
            "size": args.size,
            "length": args.length,
            "results": [asdict(result) for result in results],
        }
        records.save(args.out / "bench_generation.json", run)


if __name__ == "__main__":
    main()
