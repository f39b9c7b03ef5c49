//! The model's shape in llama.cpp's keys.

use super::values::Values;
use crate::description::{Description, Family, Mixer, ModelConfig, RopeScaling};
use crate::export::Floats;
use crate::gguf::config::gemma3_query_scalar;

/// llama.cpp's name of an architecture; what it does not do where it has none for such a model.
pub(super) fn architecture(config: &ModelConfig) -> Result<&'static str, String> {
    let moe = config.experts.is_some();
    match config.family {
        Family::Mistral if config.attention.sliding.is_some() => {
            Err("sees a window only, which GGUF can say of Gemma 3 alone; export to hf".to_owned())
        }
        Family::Llama | Family::Mistral => Ok("llama"),
        Family::Qwen2 => Ok("qwen2"),
        Family::Qwen3 | Family::Qwen35
            if config.experts.as_ref().is_some_and(|e| !e.normalised) =>
        {
            let what = "does not make its experts' weights add up to 1, as llama.cpp always does";
            Err(format!("{what}; export to hf"))
        }
        Family::Qwen3 if config.experts.as_ref().is_some_and(|e| e.dense.is_some()) => Err(
            "has layers without experts, which llama.cpp does not know in it; export to hf"
                .to_owned(),
        ),
        Family::Qwen3 if moe => Ok("qwen3moe"),
        Family::Qwen3 => Ok("qwen3"),
        Family::Qwen35 if moe => Ok("qwen35moe"),
        Family::Qwen35 => Ok("qwen35"),
        Family::Gemma3 if config.attention.query_scalar != gemma3_query_scalar(config) => {
            Err(format!(
                "divides scores by the root of {} (query_pre_attn_scalar), llama.cpp by that of {}; \
                 export to hf",
                config.attention.query_scalar,
                gemma3_query_scalar(config)
            ))
        }
        Family::Gemma3 => Ok("gemma3"),
    }
}

/// Shape and sampling; `ahead` blocks of multi-token prediction come behind the model's own.
pub(super) fn write(
    values: &mut Values,
    arch: &str,
    description: &Description,
    floats: Floats,
    ahead: usize,
) {
    let config = &description.config;
    let attention = &config.attention;
    let key = |name: &str| format!("{arch}.{name}");
    values.text("general.architecture", arch);
    values.text("general.type", "model");
    values.text("general.name", &description.name);
    values.uint(
        "general.file_type",
        match floats {
            Floats::F32 => 0,
            Floats::F16 => 1,
            Floats::Q8_0 => 7,
            Floats::Bf16 => 32,
        },
    );
    values.uint("general.quantization_version", 2);
    let sampling = &description.generation;
    for (name, value) in [
        ("temp", sampling.temperature),
        ("top_p", sampling.top_p),
        ("min_p", sampling.min_p),
        ("penalty_repeat", sampling.repetition_penalty),
    ] {
        if let Some(value) = value {
            values.float(&format!("general.sampling.{name}"), value);
        }
    }
    if let Some(k) = sampling.top_k {
        values.uint("general.sampling.top_k", k);
    }
    for (name, value) in [
        ("block_count", config.layers.len() + ahead),
        ("context_length", config.max_position),
        ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", attention.heads),
        ("attention.head_count_kv", attention.kv_heads),
        ("attention.key_length", attention.head_dim),
        ("attention.value_length", attention.head_dim),
        ("rope.dimension_count", attention.rope.rotary_dim),
        ("vocab_size", config.vocab_size),
    ] {
        values.size(&key(name), value);
    }
    values.float(&key("attention.layer_norm_rms_epsilon"), config.norm_eps);
    values.float(&key("rope.freq_base"), attention.rope.theta as f32);
    if let RopeScaling::Linear { factor } = attention.rope.scaling {
        values.text(&key("rope.scaling.type"), "linear");
        values.float(&key("rope.scaling.factor"), factor as f32);
    }
    if let Some(experts) = &config.experts {
        for (name, value) in [
            ("expert_count", experts.count),
            ("expert_used_count", experts.chosen),
            ("expert_feed_forward_length", config.intermediate_size),
        ] {
            values.size(&key(name), value);
        }
        if let Some(shared) = experts.shared {
            values.size(&key("expert_shared_feed_forward_length"), shared);
        }
    }
    if let Some(sliding) = &attention.sliding {
        values.size(&key("attention.sliding_window"), sliding.window);
        let slides = config.layers.iter().map(|mixer| *mixer == Mixer::Sliding);
        let slides: Vec<bool> = slides.collect();
        values.bools(&key("attention.sliding_window_pattern"), &slides);
        values.float(&key("rope.freq_base_swa"), sliding.rope.theta as f32);
    }
    if config.family != Family::Qwen35 {
        return;
    }
    if ahead > 0 {
        values.size(&key("nextn_predict_layers"), ahead);
    }
    // Which of three positions turns a pair; on text they are the same, but each pair needs one.
    let pairs = (attention.rope.rotary_dim / 2) as i32;
    let sections = [0, 1, 2].map(|first| (pairs - first + 2) / 3);
    values.ints(
        &key("rope.dimension_sections"),
        &[sections[0], sections[1], sections[2], 0],
    );
    let mut recurrent: Vec<bool> = config
        .layers
        .iter()
        .map(|mixer| *mixer == Mixer::Delta)
        .collect();
    recurrent.resize(config.layers.len() + ahead, false);
    values.bools(&key("attention.recurrent_layers"), &recurrent);
    let interval = recurrent.iter().position(|recurrent| !recurrent);
    values.size(
        &key("full_attention_interval"),
        interval.map_or(1, |at| at + 1),
    );
    if let Some(delta) = &config.delta {
        for (name, value) in [
            ("ssm.conv_kernel", delta.conv_kernel),
            ("ssm.state_size", delta.key_dim),
            ("ssm.group_count", delta.key_heads),
            ("ssm.time_step_rank", delta.value_heads),
            ("ssm.inner_size", delta.value_width()),
        ] {
            values.size(&key(name), value);
        }
    }
}
