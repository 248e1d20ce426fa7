"""The linear attention that SGLang imports on every CPU."""

from . import missing

chunk_gated_delta_rule_cpu = missing("chunk_gated_delta_rule_cpu")
causal_conv1d_fn_cpu = missing("causal_conv1d_fn_cpu")
causal_conv1d_update_cpu = missing("causal_conv1d_update_cpu")
