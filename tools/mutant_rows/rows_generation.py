"""Faults in generation and translation."""

from .fault import Fault

ROWS = (
    Fault(
        name="the score is not divided by the length penalty",
        path="transformer_fast/generation/scores.py",
        old="score = log_prob / length_penalty(float(max(length, 1)), config)",
        new="score = log_prob",
        tests=(
            "tests/generation/test_search.py",
            "tests/generation/test_options.py",
        ),
    ),
    Fault(
        name="hypotheses that were cut off rank with finished ones",
        path="transformer_fast/generation/beam.py",
        old="return not (hypothesis.finished or self.keeps_slots), -hypothesis.score",
        new="return False, -hypothesis.score",
        tests=(
            "tests/generation/test_search.py",
            "tests/generation/test_options.py",
        ),
    ),
    Fault(
        name="rows that go on keep the sentence of those that ended",
        path="transformer_fast/generation/greedy.py",
        old="self._row, self._sentence, self.tokens = self._row[rows], sentence[rows], self.tokens[rows]",
        new="self._row, self._sentence, self.tokens = self._row[rows], sentence[: len(rows)], self.tokens[rows]",
        tests=(
            "tests/generation/test_search.py",
            "tests/generation/test_options.py",
        ),
    ),
    Fault(
        name="EOS may come one token before the least length",
        path="transformer_fast/generation/rules.py",
        old="allowed[self._least[sentence] > steps + 1, self._eos] = -torch.inf",
        new="allowed[self._least[sentence] > steps + 2, self._eos] = -torch.inf",
        tests=(
            "tests/generation/test_search.py",
            "tests/generation/test_options.py",
        ),
    ),
    Fault(
        name="modules stay in evaluation mode after decoding",
        path="transformer_fast/generation/decoding.py",
        old="            module.training = True\n",
        new="            module.training = False\n",
        tests=("tests/generation/test_requests.py",),
    ),
    Fault(
        name="kept weights do not look at what they were made of",
        path="transformer_fast/layers/prepacked.py",
        old="tuple(others), copy_of, tuple(map(stamp_of, self._weights)))",
        new="tuple(others), copy_of)",
        tests=("tests/generation/test_kept_weights.py",),
    ),
    Fault(
        name="a continuation takes the slot of another parent",
        path="transformer_fast/generation/cache.py",
        old="sentences[slot], origins[slot] = self._sentences[parent], parent",
        new="sentences[slot], origins[slot] = self._sentences[slot], parent",
        tests=(
            "tests/generation/test_cache.py",
            "tests/generation/test_search.py",
        ),
    ),
    Fault(
        name="a drafted token counts though the model chose another",
        path="transformer_fast/generation/speculative.py",
        old="            if drafts[position : position + 1] != [token]:\n",
        new="            if position >= len(drafts):\n",
        tests=("tests/generation/test_speculative.py",),
    ),
    Fault(
        name="a checkpoint drops the state of the random numbers",
        path="transformer_fast/translation/training.py",
        old='        groups["optimizer"] |= gather_rng_states(self.ranks, self.device)\n',
        new="",
        tests=("tests/translation/test_training.py",),
    ),
    Fault(
        name="a run that diverged goes on",
        path="transformer_fast/translation/training.py",
        old="        if not math.isfinite(sum(self.window.sums())):\n",
        new="        if False:\n",
        tests=("tests/translation/test_training.py",),
    ),
    Fault(
        name="parts of an update weigh alike, whatever their tokens",
        path="transformer_fast/translation/learner.py",
        old="                loss = loss / tokens\n",
        new="                loss = loss / batch.tokens / len(batches)\n",
        tests=(
            "tests/translation/test_learner.py",
            "tests/translation/test_training.py",
        ),
    ),
    Fault(
        name="a damaged checkpoint is read",
        path="transformer_fast/translation/checkpoint.py",
        old='if hashlib.sha256(data).hexdigest() != expected["sha256"]:',
        new="if False:",
        tests=("tests/translation/test_checkpoint.py",),
    ),
    Fault(
        name="two runs may train in one folder",
        path="transformer_fast/translation/checkpoint.py",
        old="fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        new="fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        tests=("tests/translation/test_checkpoint.py",),
    ),
    Fault(
        name="padding counts in the loss",
        path="transformer_fast/translation/evaluate.py",
        old='label_smoothing=smoothing, ignore_index=PAD, reduction="sum")',
        new='label_smoothing=smoothing, reduction="sum")',
        tests=(
            "tests/translation/test_evaluate.py",
            "tests/translation/test_learner.py",
        ),
    ),
    Fault(
        name="lines come back in the order of their lengths",
        path="transformer_fast/translation/translator.py",
        old="                found[index] = self._texts(parts[index][1], answer)\n",
        new="                found[order.index(index)] = self._texts(parts[index][1], answer)\n",
        tests=("tests/translation/test_translate.py",),
    ),
    Fault(
        name="Marian's keys are loaded as values",
        path="transformer_fast/translation/checkpoints/marian_weights.py",
        old='"k_linear": "k_proj", "v_linear": "v_proj"',
        new='"k_linear": "v_proj", "v_linear": "k_proj"',
        tests=("tests/translation/test_marian.py",),
    ),
)
