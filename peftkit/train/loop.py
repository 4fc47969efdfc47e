"""The training loop.

    step:  window = next grad_accum micro-batches
           n      = target tokens of the whole window
           g      = Σ over micro-batches of ∇ (summed loss / n)       one mean over the step, however it is cut up,
                                                                      also among processes
           if loss and ‖g‖ are finite: clip g, AdamW; else skip and count
    end:   most steps skipped, or a loss that isn't finite: an error, nothing is exported

Evaluation, checkpoint and log come between steps, so a checkpoint is always of a whole number of steps.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from peftkit.artifact import save_adapter
from peftkit.base.divided import division, unequal_passes
from peftkit.data import Batch, Dataset, Position, Sampler, Stream, StreamSampler, collate, plan_evaluation
from peftkit.errors import RunError
from peftkit.evaluate import Metric, max_answer_tokens, score
from peftkit.methods import attached, holding
from peftkit.recipe import Recipe
from peftkit.train.checkpoint import (
    Checkpoint,
    RunState,
    check_same_run,
    generator_states,
    restore,
    save_checkpoint,
    set_generator_states,
)
from peftkit.train.folder import BEST, STATE, MetricsLog
from peftkit.train.generate import generate_answers
from peftkit.train.interrupt import Interrupted, StopOnInterrupt
from peftkit.train.loss import token_loss_sum
from peftkit.train.memory import num_base, peak_memory
from peftkit.train.optim import build_optimizer, learning_rate, set_lr
from peftkit.train.prepare import Prepared
from peftkit.train.processes import add_up, add_up_gradients, gather, one_row, share
from peftkit.train.speed import flops_rate, mfu

logger = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 5
_FINITE_AGAIN = "lower optim.lr, or compute in float32 or bfloat16 (quant.compute_dtype)"


class Bar(Protocol):
    """A progress display."""

    def update(self, n: int = 1, **figures: float) -> None: ...

    def close(self) -> None: ...


class Trainer:
    """One run: the loop's state and what it does between steps."""

    def __init__(self, prepared: Prepared, out: Path, record: Mapping[str, Any], *, prefix: str = "") -> None:
        """`prefix` begins each line that is logged: which of several runs it is about."""
        self.state = RunState()
        self._prefix = prefix
        self._prepared, self._out, self._record = prepared, out, record
        self._recipe: Recipe = prepared.recipe
        self._model = prepared.model
        self._device = prepared.accelerator.device
        self._parameters = prepared.parameters
        self._optimizer = build_optimizer(self._recipe.optim, self._parameters, prepared.lr_factors)
        self._sampler = prepared.sampler()
        settings = self._recipe.train
        self.total_steps = settings.max_steps or num_steps(self._sampler, settings.epochs)
        self._gradients_checked = False
        self._saved: RunState | None = None
        self._is_main = prepared.accelerator.is_main_process
        self._num_base = num_base(self._model)
        self._flops_rate = flops_rate(self._device, prepared.accelerator.num_processes)
        self._window = _LogWindow()

    def resume(self, checkpoint: Checkpoint) -> None:
        """Goes on from `checkpoint`. Raises InputError naming the field in which the recipe differs from its run's."""
        check_same_run(checkpoint, self._prepared.identity(), self.total_steps)
        restore(checkpoint, parameters=self._parameters, optimizer=self._optimizer)
        set_generator_states(checkpoint.generators[self._prepared.accelerator.process_index], self._device)
        self.state, self._saved = checkpoint.state, replace(checkpoint.state)
        self._sampler.position = Position(self.state.epoch, self.state.row, self.state.taken)

    def run(self, log: MetricsLog, bar: Bar, *, steps: int | None = None) -> bool:
        """Trains to the end, or for so many steps, and leaves a checkpoint; answers whether that is the end.

        Raises Interrupted after Ctrl-C, RunError for a loss that stays, or is at the end, not finite.
        """
        pause = None if steps is None else self.state.step + steps
        with StopOnInterrupt() as stop:
            while True:
                if self._evaluation_due():
                    self._evaluate(log, stop)
                if self._any(stop):
                    self._save()
                    raise Interrupted(
                        f"interrupted at step {self.state.step} of {self.total_steps}; "
                        f"a checkpoint is in {self._out / STATE}: --resume goes on from it"
                    )
                if self._done() or self.state.step == pause:
                    break
                self._step()
                self._report(log, bar)
                if self._save_due():
                    self._save()
            if self._done():
                self._check_end()
            self._save()
        return self._done()

    def _any(self, stop: StopOnInterrupt) -> bool:
        """Whether a stop was asked for in any process: they have to stop at the same step."""
        return add_up(float(stop.requested), self._device) > 0

    def _done(self) -> bool:
        return self.state.step >= self.total_steps or self.state.stopped_early

    # a step ------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        start = time.perf_counter()
        accelerator = self._prepared.accelerator
        batches = self._sampler.next_window()
        num_targets = sum(batch.num_target_tokens for batch in batches)
        own = share(batches, accelerator.process_index, accelerator.num_processes)
        loss = accumulate_gradients(self._model, own, num_targets=num_targets)
        if division(self._model) is not None:
            for _ in range(len(share(batches, 0, accelerator.num_processes)) - len(own)):
                idle_pass(self._model, one_row(batches[0]))
        loss = add_up(loss, self._device)
        add_up_gradients(self._parameters.values())
        max_norm = self._recipe.optim.max_grad_norm
        # not accelerate's, which go by settings of its own: the recipe alone says what a step is
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), math.inf if max_norm is None else max_norm)
        grad_norm = float(norm)
        lr = learning_rate(self._recipe.optim, self.state.step, self.total_steps)
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._check_gradients()
            set_lr(self._optimizer, lr)
            self._optimizer.step()
            self.state.skipped_in_a_row = 0
            self.state.loss = loss
        else:
            self._skip(loss, grad_norm)
        self._optimizer.zero_grad(set_to_none=True)
        num_tokens = sum(batch.num_tokens for batch in batches)
        seconds = time.perf_counter() - start
        self.state.step += 1
        self.state.epoch, self.state.row, self.state.taken = self._sampler.position
        self.state.positions += sum(batch.num_positions for batch in batches)
        self.state.tokens += num_tokens
        self.state.target_tokens += num_targets
        self.state.seconds += seconds
        self._window.add(loss, num_targets, num_tokens, seconds, lr, grad_norm)

    def _skip(self, loss: float, grad_norm: float) -> None:
        self.state.skipped += 1
        self.state.skipped_in_a_row += 1
        step = self.state.step + 1
        logger.warning("%sstep %d skipped: loss %s, gradient norm %s", self._prefix, step, loss, grad_norm)
        if self.state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RunError(
                f"{MAX_SKIPPED_IN_A_ROW} steps in a row, up to step {step}, had a loss or gradient that isn't finite: "
                f"{_FINITE_AGAIN}"
            )

    def _check_end(self) -> None:
        """Raises RunError for a run that ends with an adapter that nobody should use."""
        state, prepared = self.state, self._prepared
        if prepared.valid is None:
            data = prepared.train.head if isinstance(prepared.train, Stream) else prepared.train
            loss = self._mean_loss(replace(data, samples=data.samples[:1]), lambda: False)
            ruined = loss is None or not math.isfinite(loss)
        else:
            ruined = state.best_step is None
        if 2 * state.skipped > state.step:
            fault = f"{state.skipped} of {state.step} steps were skipped, their loss or gradient wasn't finite"
        elif ruined:
            fault = f"the loss after the last step, {state.step}, isn't finite"
        else:
            return
        raise RunError(f"{fault}: no adapter is exported, what was saved before is in {self._out}; {_FINITE_AGAIN}")

    def _check_gradients(self) -> None:
        """After the first step: an adapter whose gradients are all zero would train for nothing."""
        if self._gradients_checked:
            return
        self._gradients_checked = True
        for method in attached(self._model):
            if not any(p.grad is not None and bool(p.grad.any()) for p in method.parameters().values()):
                raise RunError(f"the {method.kind} adapter's gradients are all zero after a step: it isn't trained")

    # between steps -----------------------------------------------------------------------------------------------

    def _report(self, log: MetricsLog, bar: Bar) -> None:
        window = self._window
        figures = {"loss": window.loss, "lr": window.lr, "tokens_per_s": window.tokens_per_s}
        if self._flops_rate is not None:
            figures["mfu"] = mfu(self._num_base, window.tokens_per_s, self._flops_rate)
        figures["memory_gb"] = peak_memory(self._device) / 1e9
        bar.update(1, **figures)
        if self.state.step % self._recipe.log.every == 0 or self._done():
            log.write(
                "train",
                self.state.step,
                loss=window.loss if math.isfinite(window.loss) else None,
                lr=window.lr,
                grad_norm=window.grad_norm if math.isfinite(window.grad_norm) else None,
                tokens=self.state.tokens,
                target_tokens=self.state.target_tokens,
                tokens_per_s=window.tokens_per_s,
                mfu=figures.get("mfu"),
                memory_gb=figures["memory_gb"],
                seconds=self.state.seconds,
                skipped=self.state.skipped,
            )
            self._window = _LogWindow()

    def _save_due(self) -> bool:
        every = self._recipe.train.save_every
        return every > 0 and self.state.step % every == 0 and not self._done()

    def _save(self) -> None:
        if self._saved == self.state:
            return
        states = gather(generator_states(self._device))
        if self._is_main:
            save_checkpoint(
                self._out / STATE,
                state=self.state,
                total_steps=self.total_steps,
                identity=self._prepared.identity(),
                parameters=self._parameters,
                optimizer=self._optimizer,
                generators=states,
                best=self._out / BEST if self.state.best_step is not None else None,
            )
        self._saved = replace(self.state)

    def _evaluation_due(self) -> bool:
        if self._prepared.valid is None or self.state.evaluated == self.state.step:
            return False
        every = self._recipe.eval.every
        return self._done() or (every > 0 and self.state.step % every == 0)

    def _evaluate(self, log: MetricsLog, stop: StopOnInterrupt) -> None:
        assert self._prepared.valid is not None
        start = time.perf_counter()
        metric = self._recipe.eval.metric
        loss = self._mean_loss(self._prepared.valid, lambda: stop.requested)
        value = None if loss is None or metric == "loss" else self._score(metric)
        if loss is None:
            return
        state, recorded = self.state, loss if math.isfinite(loss) else None
        state.evaluated, state.eval_loss, state.eval_score = state.step, recorded, value
        named = {} if value is None else {metric: value}
        log.write("eval", state.step, loss=recorded, **named, seconds=time.perf_counter() - start)
        if recorded is None:
            logger.warning("%sstep %d: the evaluation's loss is %s", self._prefix, state.step, loss)
        if self._is_best(loss, value):
            state.best_step, state.best_loss, state.best_score, state.worse = state.step, recorded, value, 0
            if self._is_main:
                save_adapter(self._model, self._out / BEST, **self.adapter_record())
        else:
            state.worse += 1
        score = "" if value is None else f", {metric} {value:.4f}"
        best = "none yet" if state.best_step is None else f"at step {state.best_step}"
        logger.info("%sstep %d: evaluation loss %.4f%s, the best %s", self._prefix, state.step, loss, score, best)
        patience = self._recipe.eval.early_stop
        if patience is not None and state.worse >= patience:
            state.stopped_early = True
            logger.info("%seval.early_stop: %d evaluations without a new best: stopping", self._prefix, state.worse)

    def _is_best(self, loss: float, score: float | None) -> bool:
        """By the score, where there is one, and between equal scores by the loss."""
        state = self.state
        if score is not None and score != state.best_score:
            return state.best_score is None or score > state.best_score
        return math.isfinite(loss) and (state.best_loss is None or loss < state.best_loss)

    def _mean_loss(self, data: Dataset, stop: Callable[[], bool]) -> float | None:
        """Mean loss per target token without gradients or kept logits; None when `stop` says so in between."""
        accelerator = self._prepared.accelerator
        plan = plan_evaluation(data.lengths, batch_tokens=self._prepared.batch_positions)
        summed = 0.0
        self._model.eval()
        with torch.no_grad(), holding(self._model), unequal_passes(self._model):
            for rows in plan[accelerator.process_index :: accelerator.num_processes]:
                if stop():
                    break
                batch = collate([data.samples[row] for row in rows])
                summed += token_loss_sum(self._model, batch.to(self._device)).item()
        self._model.train()
        if add_up(float(stop()), self._device):
            return None
        return add_up(summed, self._device) / data.num_target_tokens

    def _score(self, metric: Metric) -> float:
        """A metric of the model's own greedy answers to the held-out rows."""
        accelerator = self._prepared.accelerator
        examples, index, count = self._prepared.examples, accelerator.process_index, accelerator.num_processes
        limits = max_answer_tokens(examples, [metric])
        with unequal_passes(self._model):
            own = generate_answers(
                self._model,
                self._prepared.tokenizer,
                examples[index::count],
                limits[index::count],
                batch_positions=self._prepared.batch_positions,
            )
        shares = [iter(answers) for answers in gather(own)]
        answers = [next(shares[place % count]) for place in range(len(examples))]
        return score(examples, answers, metric).value

    def adapter_record(self) -> dict[str, Any]:
        """What the adapter's `peftkit.json` says of its making, as of now."""
        metrics = {"train_loss": self.state.loss, "eval_loss": self.state.eval_loss}
        if self.state.eval_score is not None:
            metrics[self._recipe.eval.metric] = self.state.eval_score
        return {**self._record, "step": self.state.step, "metrics": metrics}


def num_steps(sampler: Sampler | StreamSampler, epochs: int) -> int:
    """Optimiser steps of some epochs over data in memory."""
    assert isinstance(sampler, Sampler), "a stream goes by max_steps"
    return sampler.num_windows(epochs)


def accumulate_gradients(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    *,
    num_targets: int | None = None,
) -> float:
    """Adds the gradient of the mean loss over all target tokens of `batches` to the parameters' `.grad`, one batch at a
    time; the sum doesn't depend on how rows are divided into batches. Returns that mean loss. `num_targets` are those
    of the whole step, where `batches` are a share of it."""
    if num_targets is None:
        num_targets = sum(batch.num_target_tokens for batch in batches)
    losses: list[torch.Tensor] = []
    with holding(model):
        for batch in batches:
            loss_sum = token_loss_sum(model, batch.to(model.device))
            (loss_sum / num_targets).backward()
            losses.append(loss_sum.detach())
    # read once all work is queued: reading waits for the device
    return sum(loss.item() for loss in losses) / num_targets


def idle_pass(model: PreTrainedModel, batch: Batch) -> None:
    """A pass forward and back that leaves neither gradients nor drawn numbers: of a process that has no micro-batch
    left while others have one, and gather a divided base for it with this one."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = [parameter.grad for parameter in trained]
    with holding(model), torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        for parameter in trained:
            parameter.grad = None
        token_loss_sum(model, batch.to(model.device)).backward()
    for parameter, grad in zip(trained, kept, strict=True):
        parameter.grad = grad


class _LogWindow:
    """Figures since the last line of metrics.jsonl."""

    def __init__(self) -> None:
        self._summed = self._seconds = 0.0
        self._targets = self._tokens = 0
        self.lr = self.grad_norm = 0.0

    def add(self, loss: float, targets: int, tokens: int, seconds: float, lr: float, grad_norm: float) -> None:
        self._summed += loss * targets
        self._targets += targets
        self._tokens += tokens
        self._seconds += seconds
        self.lr, self.grad_norm = lr, grad_norm

    @property
    def loss(self) -> float:
        """Mean per target token."""
        return self._summed / self._targets

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds
