"""TRL: ``trl grpo`` (rloo, sft, dpo, reward), its YAML files, and the commands of its example scripts.

Names and defaults are those of TRL 1.x (July 2026), with the older names that users' files still have. TRL's sizes
count completions: those of a device, of an update (times processes and accumulation steps), and of a generation (times
``steps_per_generation``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath

from areal.convert.drafts import Draft, Fate
from areal.convert.rules import Framework
from areal.convert.trl_keys import (
    DPO_DEFAULTS,
    DPO_RULES,
    GRPO_DEFAULTS,
    GRPO_RULES,
    REWARD_DEFAULTS,
    REWARD_RULES,
    RLOO_DEFAULTS,
    RLOO_RULES,
    SCALES,
    SFT_DEFAULTS,
    SFT_RULES,
    mixture,
)


def _begin(draft: Draft, trainer: str, rows: str) -> None:
    """Set what all of TRL's trainers have in common."""
    _processes(draft)
    values = draft.values
    draft.set("trainer.type", trainer)
    draft.set("train_dataset.type", rows)
    draft.model = str(values.get("model_name_or_path") or "")
    draft.set("actor.path", draft.model)
    if not draft.model:
        draft.mark("model_name_or_path", Fate.REFUSED, "no model is named: the script says it; add it as KEY=VALUE")
    folder = PurePath(str(values.get("output_dir") or draft.model or "trl")).name
    draft.set("experiment_name", folder or "trl")
    draft.set("trial_name", str(values.get("run_name") or trainer))
    _data(draft)
    _dtype(draft)
    _optimizer(draft)
    if values["use_peft"]:
        draft.adapt("lora_r", "lora_alpha", "lora_target_modules")
        if values["lora_dropout"]:
            draft.mark("lora_dropout", Fate.LOSSY, "adapters have no dropout")
    _report(draft)


def _processes(draft: Draft) -> None:
    """Set ``num_processes``, over all nodes, from the options of accelerate, torchrun or deepspeed."""
    values = draft.values
    a_node = values.get("nproc_per_node") or values.get("num_gpus")
    nodes = values.get("nnodes") or values.get("num_nodes") or 1
    if a_node and not draft.is_given("num_processes"):
        draft.values = {**values, "num_processes": int(a_node) * int(nodes)}
    launchers = [key for key in ("config_file", "accelerate_config") if draft.is_given(key)]
    if a_node or draft.is_given("num_processes"):
        for key in launchers:
            draft.mark(key, Fate.IGNORED, "num_processes is known")
    elif not launchers and not values["use_cpu"] and not values.get("no_cuda"):
        note = "taken as 1; accelerate starts one for each GPU of the machine: say num_processes=N"
        draft.mark("num_processes", Fate.LOSSY, note, "train_dataset.batch_size")


def _data(draft: Draft) -> None:
    values = draft.values
    name, config = values.get("dataset_name"), values.get("dataset_config")
    key = "datasets" if values.get("datasets") else "dataset_mixture"
    if not name and values.get(key):
        listed = mixture(values[key])
        draft.set("train_dataset.path", listed if listed[1:] else listed[0])
        if isinstance(values[key], Mapping) and values[key].get("test_split_size"):
            draft.mark(key, Fate.LOSSY, "no rows are set aside for evaluation", "train_dataset.path")
        return
    if not name:
        draft.mark("dataset_name", Fate.REFUSED, "no data set is named: the script loads it; add dataset_name=NAME")
        return
    if config and not str(name).endswith((".json", ".jsonl", ".parquet")):
        draft.set("train_dataset.path", f"{name}:{config}:{draft.config['train_dataset']['split']}")
    else:
        draft.set("train_dataset.path", str(name))
    if str(values.get("evaluation_strategy") or values["eval_strategy"] or "no") != "no":
        split = values["dataset_test_split"]
        draft.set("valid_dataset.path", f"{name}:{config}:{split}" if config else str(name))
        draft.set("valid_dataset.split", split)


def _dtype(draft: Draft) -> None:
    """Set the precision of a pass: bfloat16 with float32 weights, or float32 if ``bf16`` is false or CPUs compute."""
    values = draft.values
    on_cpu = values["use_cpu"] or values.get("no_cuda")
    whole_floats = on_cpu or (values["bf16"] is False and str(values.get("dtype")) in ("float32", "auto"))
    draft.set("actor.dtype", "float32" if whole_floats else "bfloat16")


_EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit")


def _optimizer(draft: Draft) -> None:
    values = draft.values
    name = str(values["optim"])
    if name in _EIGHT_BITS:
        draft.mark("optim", Fate.LOSSY, "its states are float32", "actor.optimizer.type")
    elif name == "sgd":
        draft.set("actor.optimizer.type", "sgd")
    elif name not in ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw"):
        draft.mark("optim", Fate.REFUSED, f"{name} is not here; Adam and SGD are")
    kwargs = values.get("lr_scheduler_kwargs")
    if kwargs:
        least = kwargs.get("min_lr_rate") if isinstance(kwargs, Mapping) else None
        if least is None or set(kwargs) != {"min_lr_rate"}:
            draft.mark("lr_scheduler_kwargs", Fate.REFUSED, "only min_lr_rate has a counterpart")
        else:
            draft.set("actor.optimizer.min_lr_ratio", least)
    given = values["warmup_steps"]
    if 0 < given < 1:
        draft.set("actor.optimizer.warmup_steps_proportion", given)
    else:
        draft.warm_up("warmup_steps", max(0, draft.number("max_steps")))
    draft.without_warm_up("lr_scheduler_type", "warmup_steps", "warmup_ratio")


def _report(draft: Draft) -> None:
    given = draft.values.get("report_to") or []
    names = given if isinstance(given, list) else [given]
    for name in names:
        if name in ("wandb", "swanlab"):
            draft.set(f"stats_logger.{name}.mode", "online")
        elif name == "trackio":
            space = draft.values.get("trackio_space_id")
            draft.set("stats_logger.trackio", {"mode": "online", "space_id": space} if space else {"mode": "local"})
        elif name == "tensorboard":
            draft.set("stats_logger.tensorboard.path", "tensorboard")
        elif name not in ("none", "all"):
            draft.mark("report_to", Fate.IGNORED, f"there is no tracker {name}: metrics.jsonl is written always")


_LOGGED = 10  # TRL's logging_steps, which is also the default of eval_steps


def _periods(draft: Draft, updates: int) -> None:
    """Set the run's length, and its periods. TRL counts updates, of which areal's step has ``updates``."""
    values = draft.values
    if values["max_steps"] > 0:
        draft.set("total_train_steps", max(1, -(-draft.number("max_steps") // updates)))
        if updates > 1:
            draft.mark("max_steps", Fate.MAPPED, f"a step here is {updates} updates", "total_train_steps")
    evaluation = str(values.get("evaluation_strategy") or values["eval_strategy"] or "no")
    how_often = (
        ("save_steps", str(values["save_strategy"]), "saver", values["save_steps"]),
        ("eval_steps", evaluation, "evaluator", values.get("eval_steps") or _LOGGED),
    )
    for key, strategy, target, every in how_often:
        if strategy == "epoch":
            draft.set(f"{target}.freq_epochs", 1)
        elif strategy == "steps" and 0 < every < 1:
            draft.mark(key, Fate.LOSSY, "a share of all steps: say how many")
        elif strategy == "steps":
            draft.set(f"{target}.freq_steps", max(1, int(every) // updates))
    if values["eval_on_start"] and evaluation != "no":
        draft.set("evaluator.eval_before_train", True)
    draft.set("recover.mode", "auto")
    draft.validate()
    draft.save_and_resume(draft.config.get("saver", {}).get("freq_steps"))


def _rows_of_update(draft: Draft) -> int:
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")
    product = 1
    for name in sizes:
        product *= draft.number(name)
    return product


def _offline(trainer: str, rows: str, more: Callable[[Draft], None]) -> Callable[[Draft], None]:
    def finish(draft: Draft) -> None:
        _begin(draft, trainer, rows)
        draft.set("train_dataset.batch_size", _rows_of_update(draft))
        if draft.values.get("max_length") is not None or draft.values.get("max_seq_length") is not None:
            draft.mark("truncation_mode", Fate.LOSSY, "rows longer than max_length are left out, not cut")
        more(draft)
        longest = draft.config["train_dataset"].get("max_length", 1024) * (1 if trainer == "sft" else 2)
        draft.bound_micro_batches(longest, {"actor": draft.number("per_device_train_batch_size")})
        draft.train_on(draft.number("num_processes"))
        _periods(draft, 1)

    return finish


def _sft(draft: Draft) -> None:
    values = draft.values
    draft.set("train_dataset.train_on", "assistant" if values.get("assistant_only_loss") else "last")
    if values.get("completion_only_loss") is False:
        draft.mark("completion_only_loss", Fate.REFUSED, "prompts are not learned")
    elif not values.get("completion_only_loss") and not values.get("assistant_only_loss"):
        note = "of rows with messages all tokens are learned; here those of the last answer"
        draft.mark("completion_only_loss", Fate.LOSSY, note, "train_dataset.train_on")


def _dpo(draft: Draft) -> None:
    given = draft.values.get("loss_type", "sigmoid")
    names = given if isinstance(given, list) else [given]
    if len(names) != 1 or names[0] not in ("sigmoid", "ipo"):
        draft.mark("loss_type", Fate.REFUSED, f"{given} is not here; sigmoid and ipo are")
    else:
        draft.set("actor.loss_type", names[0])


_AGGREGATED = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


_OLDER = ("torch_dtype", "max_prompt_length", "vllm_device")
_EARLIER = {"max_completion_length": "TRL up to 1.9 has 256"}
_EARLIER_GRPO = {
    **_EARLIER,
    "beta": "TRL before 0.19 has 0.04",
    "loss_type": "TRL before 0.22 has another one",
    "temperature": "TRL before 0.18 has 0.9",
}


def _online(draft: Draft, earlier: Mapping[str, str]) -> int:
    """Set what GRPO and RLOO have in common. Return the number of updates in a step."""
    _begin(draft, "grpo", "rl")
    values = draft.values
    update, group = _rows_of_update(draft), draft.number("num_generations")
    older = any(map(draft.is_given, _OLDER))
    device = update // draft.number("gradient_accumulation_steps")
    generated = values.get("generation_batch_size")
    steps = values.get("steps_per_generation") or (generated and int(generated) // device)
    generated = int(generated or device * int(steps or draft.number("gradient_accumulation_steps")))
    updates = max(1, generated // update)
    if generated % group or generated % update:
        note = f"{generated} completions of a generation are not whole groups of {group} and updates of {update}"
        note += ", with num_processes=1" if values["num_processes"] == 1 else ""
        draft.mark("per_device_train_batch_size", Fate.REFUSED, note)
    prompts = max(1, generated // group)
    draft.set("train_dataset.batch_size", prompts)
    draft.set("actor.ppo_n_minibatches", updates)
    if draft.is_given("per_device_train_batch_size"):
        note, fate = f"{generated} completions of a step: {prompts} prompts, {updates} minibatches", Fate.MAPPED
        if older and draft.number("per_device_train_batch_size") < group:
            note, fate = f"{note}; TRL 0.14 counts prompts", Fate.LOSSY
        draft.mark("per_device_train_batch_size", fate, note, "train_dataset.batch_size")
    draft.ask_for_version(earlier, is_older=older)
    if values.get("max_prompt_length"):
        draft.set("train_dataset.max_length", draft.number("max_prompt_length"))
        draft.mark("max_prompt_length", Fate.LOSSY, "longer prompts are left out, not cut", "train_dataset.max_length")
    if values.get("epsilon_high") is not None:
        draft.set("actor.eps_clip_higher", values["epsilon_high"])
    column, system = values.get("dataset_prompt_column"), str(values.get("system_prompt") or "")
    key = "dataset_prompt_column" if column else "system_prompt"
    draft.pick_columns({"prompt": column or ("prompt" if system else None)}, key, system)
    draft.set("actor.kl_ctl", 0.0)
    draft.set("eval_gconfig.n_samples", int(values.get("num_generations_eval") or group))
    if values["beta"]:
        draft.set("ref", {"path": draft.model})
    longest = draft.number("max_completion_length") + int(values.get("max_prompt_length") or 512)
    rows = draft.number("per_device_train_batch_size")
    draft.bound_micro_batches(longest, {"actor": rows, "ref": rows})
    updates *= draft.number("num_iterations")
    gpus, tensor = draft.number("num_processes"), draft.number("vllm_tensor_parallel_size")
    if values["use_vllm"] and values["vllm_mode"] == "server":
        draft.serve(tensor, tensor)
        draft.train_on(gpus)
    else:
        draft.lay_out(gpus, tensor)
    memory = "vllm_gpu_memory_utilization" if values["use_vllm"] else ""
    length = "vllm_max_model_len" if draft.is_given("vllm_max_model_len") else "vllm_max_model_length"
    draft.engine_flags("vllm", memory, length, "", "", "vllm_dtype")
    _rewards(draft)
    draft.set("actor.recompute_logprob", True)
    draft.keep_rewards()
    draft.set("rollout.max_head_offpolicyness", 0)
    draft.set("rollout.dump_to_file", True)
    _periods(draft, updates)
    return updates


def _grpo(draft: Draft) -> None:
    values = draft.values
    _online(draft, _EARLIER_GRPO)
    loss = str(values["loss_type"])
    if loss not in _AGGREGATED:
        draft.mark("loss_type", Fate.REFUSED, f"{loss} is not here; {', '.join(_AGGREGATED)} are")
    else:
        draft.set("actor.loss_agg_mode", _AGGREGATED[loss])
    if loss == "bnpo" and _rows_of_update(draft) > draft.number("per_device_train_batch_size"):
        note = "the mean is over the tokens of an update, not of each forward pass"
        draft.mark("loss_type", Fate.LOSSY, note, "actor.loss_agg_mode")
    if loss == "sapo":
        draft.set("actor.use_sapo_loss", True)
        for name in ("pos", "neg"):
            if f"sapo_temperature_{name}" in values:
                draft.set(f"actor.sapo_tau_{name}", values[f"sapo_temperature_{name}"])
    if loss == "cispo":  # TRL limits the ratio itself, not its distance from 1
        draft.set("actor.use_cispo_loss", True)
        draft.set("actor.eps_clip", 1.0)
        draft.set("actor.eps_clip_higher", float(values.get("epsilon_high") or values["epsilon"]) - 1)
        if draft.config["actor"]["eps_clip_higher"] <= 0:
            draft.mark("epsilon_high", Fate.REFUSED, "it bounds the ratio of loss_type cispo: it is above 1")
    scale = SCALES.get(str(values["scale_rewards"]))
    draft.set("actor.reward_norm", {"mean_level": "group", "std_level": scale, "eps": 1e-4})
    if values["beta"]:
        draft.set("actor.kl_loss_coef", float(values["beta"]))
        draft.set("actor.kl_loss_type", "k3")
    _correction(draft)


def _correction(draft: Draft) -> None:
    values = draft.values
    if not (values["use_vllm"] and values["vllm_importance_sampling_correction"]):
        for name in ("correction", "mode", "clip_max", "clip_min", "cap"):
            if draft.is_given(f"vllm_importance_sampling_{name}"):
                draft.mark(f"vllm_importance_sampling_{name}", Fate.IGNORED, "no correction is made")
        return
    level, _, how = str(values["vllm_importance_sampling_mode"]).partition("_")
    if level not in ("token", "sequence") or how not in ("mask", "truncate"):
        draft.mark("vllm_importance_sampling_mode", Fate.REFUSED, "it is token_ or sequence_, and mask or truncate")
        return
    most = values.get("vllm_importance_sampling_cap") or values["vllm_importance_sampling_clip_max"]
    least = values.get("vllm_importance_sampling_clip_min")
    draft.set("actor.use_decoupled_loss", True)
    draft.config["actor"].pop("recompute_logprob")
    rejection = {"level": level, "action": "mask" if how == "mask" else "clamp"}
    rejection |= {"agg": "sum"} if level == "sequence" else {}
    draft.set("actor.rejection_sampling", {**rejection, "upper": most, "lower": least})


def _rloo(draft: Draft) -> None:
    updates, values = _online(draft, _EARLIER), draft.values
    draft.set("actor.reward_norm", {"mean_level": "group", "std_level": None, "mean_leave1out": True})
    draft.set("actor.loss_agg_mode", "seq-mean-token-sum")
    if values["normalize_advantages"]:
        draft.set("actor.adv_norm", {"mean_level": "batch", "std_level": "batch", "eps": 1e-4})
        draft.mark("normalize_advantages", Fate.LOSSY, "the mean is that of all tokens, not of all samples")
    if values["beta"]:
        draft.set("actor.kl_ctl", float(values["beta"]))
        draft.mark("beta", Fate.LOSSY, "the KL penalty is not part of the baseline", "actor.kl_ctl")
    if updates > 1:
        note = "the ratio is that of each token, not of the whole answer"
        draft.mark("num_iterations", Fate.LOSSY, note, "actor.ppo_epochs")
    if values.get("reward_clip_range") is not None:
        draft.clip_rewards("reward_clip_range")


_ACCURACY = """
return math_verify_reward_fn(prompt, completions, prompt_ids, completion_ids, answer=data.get("solution"))
"""
_REASONED = """
thought, tag, answer = completions.rpartition("</think>")
if not tag:
    return 0.0
return math_verify_reward_fn(prompt, answer, prompt_ids, completion_ids, answer=data.get("solution"))
"""
_FORMAT = """
thought, tag, answer = completions.partition("</think>")
return float(bool(tag) and thought.startswith("<think>") and "<think>" not in thought[7:])
"""
_CALLED = """
asked = data.get("messages") if CHAT else prompt
answered = [{{"role": "assistant", "content": completions}}] if CHAT else completions
columns = {{name: [value] for name, value in data.items() if name not in ("messages", "prompt")}}
found = import_module({module!r}).{function}(
    prompts=[asked], completions=[answered], completion_ids=[completion_ids], **columns
)
return float(found[0] or 0.0)
"""
_BUILT_IN = {"accuracy_reward": _ACCURACY, "reasoning_accuracy_reward": _REASONED, "think_format_reward": _FORMAT}


def _rewards(draft: Draft) -> None:
    given = draft.values.get("reward_funcs") or []
    names = [str(each) for each in (given if isinstance(given, list) else [given])]
    functions: dict[str, str] = {}
    for name in names:
        module, _, function = name.rpartition(".")
        if name in _BUILT_IN:
            functions[name] = _BUILT_IN[name]
        elif module and function.isidentifier():
            functions[function] = _CALLED.format(module=module, function=function)
        else:
            instead = "actor.overlong_reward_penalty" if "overlong" in name else "add reward_funcs=module.function"
            draft.mark("reward_funcs", Fate.REFUSED, f"{name} is no function that is known here: {instead}")
    if not names:
        note = "the script sets the reward in code; add reward_funcs=module.function"
        draft.mark("reward_funcs", Fate.REFUSED, note)
    elif any(name.endswith("accuracy_reward") for name in names):
        draft.mark("reward_funcs", Fate.LOSSY, "math-verify compares answers with its own settings", "reward_fn")
    if not functions:
        return
    imports = (
        ["from importlib import import_module"] if any("import_module" in each for each in functions.values()) else []
    )
    if any("math_verify" in each for each in functions.values()):
        imports.append("from areal.reward.math import math_verify_reward_fn")
    chat = "CHAT = True  # False where the prompts of the data set are text: then TRL passes text to its functions"
    imports += ["", chat] if any("CHAT" in each for each in functions.values()) else []
    draft.write_rewards("TRL's reward functions, called for one answer at a time", "\n".join(imports), functions)
    weights = draft.values.get("reward_weights")
    weights = weights if isinstance(weights, list) or weights is None else [weights]
    if weights is not None and len(weights) != len(functions):
        draft.mark("reward_weights", Fate.REFUSED, f"{len(weights)} weights for {len(functions)} functions")
    elif weights is not None:
        draft.set("reward_weights", weights)


GRPO = Framework("trl grpo", GRPO_RULES, GRPO_DEFAULTS, _grpo)
RLOO = Framework("trl rloo", RLOO_RULES, RLOO_DEFAULTS, _rloo)
SFT = Framework("trl sft", SFT_RULES, SFT_DEFAULTS, _offline("sft", "sft", _sft))
DPO = Framework("trl dpo", DPO_RULES, DPO_DEFAULTS, _offline("dpo", "dpo", _dpo))
REWARD = Framework("trl reward", REWARD_RULES, REWARD_DEFAULTS, _offline("rw", "rw", lambda draft: None))
