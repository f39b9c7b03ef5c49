"""The command line: `kozue-train STAGE ...`; every stage resumes from what its folder holds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kozue_train import __version__


def _data(a: argparse.Namespace) -> None:
    from kozue_train.stages.data import DataOptions, run

    run(DataOptions(raw=a.raw, out=a.out, vocab_size=a.vocab, seed=a.seed, tasks=a.tasks, maths=a.maths, talk=a.talk, processes=a.processes, prompts=a.prompts, families_only=a.families_only, compress=not a.plain))


def _prompts(a: argparse.Namespace) -> None:
    from kozue_train.stages.data import save_questions

    save_questions(a.data, a.target, a.out, a.count)


def _ask(a: argparse.Namespace) -> None:
    from kozue_train.stages.ask import AskOptions, run

    run(AskOptions(target=a.target, out=a.out, count=a.count, after=a.after, avoid=tuple(a.avoid), borrow=a.borrow, borrow_from=a.borrow_from, temperature=a.temperature, stops=_stops(a), seed=a.seed, device=a.device, dtype=a.dtype))


def _target(a: argparse.Namespace) -> None:
    from kozue_train.model.config import TargetConfig
    from kozue_train.stages.target import TargetOptions, run

    config = TargetConfig(
        vocab_size=a.vocab, hidden_size=a.hidden, intermediate_size=a.ffn, num_hidden_layers=a.layers, num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads, head_dim=a.head_dim, linear_num_key_heads=a.linear_heads, linear_num_value_heads=a.linear_heads,
        linear_key_head_dim=a.linear_dim, linear_value_head_dim=a.linear_dim,
    )
    run(TargetOptions(
        data=a.data, out=a.out, config=config, planned_seconds=a.planned_seconds, call_seconds=a.call_seconds, max_steps=a.max_steps, rows=a.rows,
        length=a.length, matrix_lr=a.matrix_lr, other_lr=a.other_lr, decay_from=a.decay_from, late_from=a.late_from, seed=a.seed, start_from=a.start_from, device=a.device,
        fast=a.device == "cuda" and not a.plain, eval_every=a.eval_every, stable_copy=a.stable_copy,
    ))


def _generate(a: argparse.Namespace) -> None:
    from kozue_train.stages.generate import GenerateOptions, run

    run(GenerateOptions(target=a.target, prompts=a.prompts, out=a.out, new_tokens=a.new_tokens, batch=a.batch, categories=tuple(filter(None, a.categories.split(","))), per_category=a.per_category, part=a.part, parts=a.parts,
                        temperatures=tuple(map(float, a.temperatures.split(","))), stops=_stops(a), device=a.device, seconds=a.seconds, dtype=a.dtype))


def _stops(a: argparse.Namespace) -> tuple[int, ...]:
    return tuple(map(int, a.stops.split(",")))


def _drafter(a: argparse.Namespace) -> None:
    from kozue_train.stages import dflash, weaver

    fields = {k: v for k, v in vars(a).items() if k in dflash.DrafterOptions.__dataclass_fields__}
    (dflash if a.stage == "dflash" else weaver).run(dflash.DrafterOptions(**fields))


def _eval(a: argparse.Namespace) -> None:
    from kozue_train.stages.evaluate import EvalOptions, run

    run(EvalOptions(target=a.target, texts=a.texts, drafter=a.drafter, weaver=a.weaver, out=a.out, budgets=tuple(map(int, a.budgets.split(","))),
                    per_category=a.per_category, processes=a.processes, device=a.device, dtype=a.dtype))


def _distill(a: argparse.Namespace) -> None:
    from kozue_train.stages import distill

    distill.run(distill.DistillOptions(**{k: v for k, v in vars(a).items() if k in distill.DistillOptions.__dataclass_fields__}))


def _import_gguf(a: argparse.Namespace) -> None:
    from kozue_train.stages.import_gguf import run

    run(a.file, a.out, tokenizer=not a.no_tokenizer)


def _plot(a: argparse.Namespace) -> None:
    from kozue_train.log import plot

    plot(a.log, a.out, ys=tuple(a.fields.split(",")))


def _check(a: argparse.Namespace) -> None:
    from kozue_train.stages.check import run

    run(a.rows, a.length)


def _numbers(p: argparse.ArgumentParser, **defaults: float) -> None:
    """Options that take a number: an int where the default is one, else a float."""
    for name, value in defaults.items():
        p.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)


def _loop(p: argparse.ArgumentParser, **defaults: float) -> None:
    """What every training of a drafter, a Weaver or a distilled target takes; `defaults`: batch, steps and rates."""
    _numbers(p, seed=0, call_seconds=1e9, planned_seconds=0.0, **defaults)


def _machine(p: argparse.ArgumentParser, device: str = "cuda", products: bool = True) -> None:
    p.add_argument("--device", default=device)
    if products:
        p.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="type of the products")


def parser() -> argparse.ArgumentParser:
    """All stages and their options."""
    top = argparse.ArgumentParser(prog="kozue-train", description="Train Kozue's models: data, target, dflash, weaver, distill, eval.")
    top.add_argument("--version", action="version", version=__version__)
    sub = top.add_subparsers(dest="stage", required=True)

    p = sub.add_parser("data", help="packages on disk -> manifest, tokenizer, token shards")
    p.add_argument("--raw", type=Path, required=True, help="folder with wheels/*.whl, *.deb, *.tgz")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--vocab", type=int, default=16384)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--tasks", type=int, default=400_000, help="conversations about programming tasks")
    p.add_argument("--maths", type=int, default=200_000)
    p.add_argument("--talk", type=int, default=100_000)
    p.add_argument("--processes", type=int, default=2)
    p.add_argument("--prompts", type=int, default=4000, help="prompts a category for the target's own answers")
    p.add_argument("--families-only", action="store_true", help="leave the combination tasks out (quick tests)")
    p.add_argument("--plain", action="store_true", help="write shards uncompressed")
    p.set_defaults(run=_data)

    p = sub.add_parser("target", help="train kozue-nano")
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    _numbers(p, vocab=16384, hidden=768, ffn=1792, layers=12, heads=6, kv_heads=2, head_dim=128, linear_heads=4, linear_dim=128, rows=64, length=1024, seed=0, max_steps=10**9, eval_every=500)
    _numbers(p, planned_seconds=1200.0, call_seconds=540.0, matrix_lr=3e-3, other_lr=3e-3, decay_from=0.6, late_from=2 / 3)
    p.add_argument("--start-from", type=Path, help="HF folder whose weights to start from")
    _machine(p, products=False)
    p.add_argument("--plain", action="store_true", help="no Triton and no compilation")
    p.add_argument("--stable-copy", action="store_true", help="also keep the weights from before the decay")
    p.set_defaults(run=_target)

    p = sub.add_parser("prompts", help="questions in the chat template of any model, for its drafter")
    p.add_argument("--data", type=Path, required=True, help="folder of the data stage (its sources and tasks)")
    p.add_argument("--target", type=Path, required=True, help="folder with the model's tokenizer and chat template")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--count", type=int, default=4000, help="questions a category")
    p.set_defaults(run=_prompts)

    p = sub.add_parser("ask", help="questions that a chat model writes itself, as prompts")
    p.add_argument("--target", type=Path, required=True, help="folder of a transformers checkpoint with tokenizer.json and a chat template")
    p.add_argument("--out", type=Path, required=True, help="prompts file to write (.json)")
    _numbers(p, count=4000, seed=0, temperature=1.0)
    p.add_argument("--after", type=Path, help="texts (.npz) to whose answers the questions are follow-ups")
    p.add_argument("--avoid", type=Path, nargs="*", default=[], help="prompts files whose questions must not come out (those of the evaluation)")
    p.add_argument("--borrow", type=Path, help="prompts file that this stage made for another model: its questions instead")
    p.add_argument("--borrow-from", type=Path, help="that model's folder (its chat template)")
    p.add_argument("--stops", default="0,2", help="token ids that end a question")
    _machine(p)
    p.set_defaults(run=_ask)

    p = sub.add_parser("generate", help="the target's own answers to prompts")
    p.add_argument("--target", type=Path, required=True, help="folder of a transformers checkpoint with tokenizer.json")
    p.add_argument("--prompts", type=Path, required=True, help="prompts.train.json or prompts.eval.json of the data stage")
    p.add_argument("--out", type=Path, required=True, help="texts file to write (.npz)")
    _numbers(p, new_tokens=220, batch=2048, per_category=0, part=0, parts=1, seconds=1e9)
    p.add_argument("--categories", default="", help="only these, with commas between: a batch lasts as long as its longest answer, so short kinds go apart")
    p.add_argument("--temperatures", default="0,0,0.7,1")
    p.add_argument("--stops", default="0,2", help="token ids that end an answer")
    _machine(p)
    p.set_defaults(run=_generate)

    for stage, text in (("dflash", "train a DFlash drafter"), ("weaver", "train a Weaver on a frozen drafter")):
        p = sub.add_parser(stage, help=text)
        p.add_argument("--target", type=Path, required=True)
        p.add_argument("--texts", type=Path, required=True)
        p.add_argument("--out", type=Path, required=True)
        _loop(p, rows=64, length=384, steps=4000, matrix_lr=3e-3, other_lr=1e-3)
        _numbers(p, anchors=16, gamma=7.0)
        p.add_argument("--bits", type=int, choices=(0, 4, 8), default=0, help="train with the engine's rounding")
        _machine(p)
        p.add_argument("--held-out", type=Path, help="texts that training does not see, whose figures are logged too")
        p.add_argument("--keep-features", action="store_true", help="fixed batches of texts, the target run once on each (small sets, slow machines)")
        p.add_argument("--drafter", type=Path, required=stage == "weaver", help="drafter of the Weaver, or to go on from")
        if stage == "dflash":
            _numbers(p, layers=3, intermediate=1024, heads=6, kv_heads=2, head_dim=128, taps=5, block=16, mask_id=5, rope_theta=10000.0)
        else:
            p.add_argument("--weaver", type=Path, help="Weaver to go on from")
            _numbers(p, rank=384, weaver_heads=3, mlp=768, pool=128)
            p.add_argument("--mix", type=float, default=0.5, help="share of KL in the loss, the rest is total variation")
        p.set_defaults(run=_drafter)

    p = sub.add_parser("distill", help="quantisation-aware distillation of the target")
    for name in ("target", "data", "out"):
        p.add_argument(f"--{name}", type=Path, required=True)
    _loop(p, rows=16, length=512, steps=1000, matrix_lr=1e-4, other_lr=1e-4)
    _numbers(p, check_rows=16)
    p.add_argument("--bits", type=int, choices=(4, 8), default=4)
    _machine(p, products=False)
    p.set_defaults(run=_distill)

    p = sub.add_parser("eval", help="tokens per pass of plain, chain, DDTree and Weaver trees")
    for name in ("target", "texts", "drafter", "out"):
        p.add_argument(f"--{name}", type=Path, required=True)
    p.add_argument("--weaver", type=Path)
    p.add_argument("--budgets", default="8,16,32,64")
    p.add_argument("--per-category", type=int, default=24)
    p.add_argument("--processes", type=int, default=1, help="processes that share the device, each with some of the categories")
    _machine(p, device="cpu")
    p.set_defaults(run=_eval)

    p = sub.add_parser("import-gguf", help="a GGUF of the llama or qwen2 family -> a transformers folder")
    p.add_argument("file", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--no-tokenizer", action="store_true", help="weights and configuration only")
    p.set_defaults(run=_import_gguf)

    p = sub.add_parser("check-device", help="compare the fast kernels with plain PyTorch on this GPU and time them")
    _numbers(p, rows=16, length=1024)
    p.set_defaults(run=_check)

    p = sub.add_parser("plot", help="SVG chart of a JSON lines log")
    p.add_argument("log", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--fields", default="loss")
    p.set_defaults(run=_plot)
    return top


def main(argv: list[str] | None = None) -> int:
    """Entry point; wrong input ends with one line on standard error."""
    args = parser().parse_args(argv)
    try:
        args.run(args)
    except (FileNotFoundError, ValueError, FloatingPointError) as error:
        print(f"kozue-train {args.stage}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
