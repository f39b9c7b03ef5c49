//! Where Hugging Face's tensors lie in lalamo's: which rows of which of its joined matrices.

use std::collections::BTreeMap;

use super::config::{MixerConfig, Norm, Settings};
use super::matrix;
use super::structure::{Structure, structure};
use crate::description::ModelConfig;
use crate::error::Error;
use crate::shards::Shards;
use crate::stored::{Found, Place, VectorPlace, wrong};

/// Where everything lies.
pub(super) fn find(
    shards: &Shards,
    settings: &Settings,
    config: &ModelConfig,
) -> Result<Found, Error> {
    let transformer = &settings.decoder_config.transformer_config;
    let fused = transformer.layer_configs.iter().any(
        |layer| matches!(&layer.mixer_config, MixerConfig::Attention(attention) if attention.fused()),
    );
    let mut found = place(shards, &structure(config, fused))?;
    let plus_one = if config.norm_plus_one { 1.0 } else { 0.0 };
    let mut offset = |name: &str, norm: &Option<Norm>| {
        let place = found.vectors.get_mut(&format!("{name}.weight"));
        if let (Some(place), Some(norm)) = (place, norm) {
            place.add = norm.scale_offset.unwrap_or(0.0) - plus_one;
        }
    };
    for (index, layer) in transformer.layer_configs.iter().enumerate() {
        let name = format!("model.layers.{index}");
        let after = Some(layer.pre_mlp_norm_config.clone());
        offset(
            &format!("{name}.input_layernorm"),
            &layer.pre_mixer_norm_config,
        );
        offset(&format!("{name}.post_attention_layernorm"), &after);
        if let MixerConfig::Attention(attention) = &layer.mixer_config {
            let name = format!("{name}.self_attn");
            offset(&format!("{name}.q_norm"), &attention.query_norm_config);
            offset(&format!("{name}.k_norm"), &attention.key_norm_config);
        }
    }
    offset("model.norm", &Some(transformer.output_norm_config.clone()));
    Ok(found)
}

/// Finds the tensors of a structure.
pub(super) fn place(shards: &Shards, structure: &Structure) -> Result<Found, Error> {
    let mut found = Found::new("lalamo");
    // A part of a matrix: its first row, the stored matrix, the first row there, their number.
    let mut parts: BTreeMap<&str, (usize, Vec<[usize; 4]>)> = BTreeMap::new();
    let mut biases: BTreeMap<&str, Vec<(usize, String, usize, usize)>> = BTreeMap::new();
    for joined in &structure.joined {
        let (stored, shape) = matrix(shards, &mut found, &joined.path, joined.layout)?;
        let expected = [joined.n(), joined.k];
        if shape != expected {
            return Err(Error::shape(shards.dir(), &joined.path, &shape, &expected));
        }
        if let Some(name) = &joined.biases {
            check_len(shards, name, joined.n())?;
        }
        let mut at = 0;
        for run in &joined.runs {
            let (_, list) = parts.entry(&run.name).or_insert((joined.k, Vec::new()));
            list.push([run.first, found.stored.len(), at, run.count]);
            if let Some(name) = &joined.biases {
                let part = (run.first, name.clone(), at, run.count);
                biases.entry(&run.name).or_default().push(part);
            }
            at += run.count;
        }
        found.stored.push(stored);
    }
    for (name, (k, mut parts)) in parts {
        parts.sort_unstable();
        let place = Place {
            n: parts.iter().map(|part| part[3]).sum(),
            k,
            parts: parts
                .into_iter()
                .map(|[_, stored, first, count]| (stored, first, count))
                .collect(),
        };
        found.matrices.insert(format!("{name}.weight"), place);
    }
    for (name, mut parts) in biases {
        parts.sort_unstable();
        let len = parts.iter().map(|part| part.3).sum();
        let parts: Vec<_> = parts
            .into_iter()
            .map(|(_, stored, first, count)| (stored, first, count))
            .collect();
        vector(&mut found, format!("{name}.bias"), vec![len], parts);
    }
    for plain in &structure.plain {
        let len = plain.shape.iter().product();
        check_len(shards, &plain.path, len)?;
        let parts = vec![(plain.path.clone(), 0, len)];
        vector(&mut found, plain.name.clone(), plain.shape.clone(), parts);
    }
    Ok(found)
}

fn check_len(shards: &Shards, name: &str, len: usize) -> Result<(), Error> {
    let shape = &shards.get(name)?.entry.shape;
    if shape.iter().product::<usize>() == len {
        return Ok(());
    }
    let what = format!("has shape {shape:?}, but {len} values are needed");
    Err(wrong(shards, name, what))
}

fn vector(found: &mut Found, name: String, shape: Vec<usize>, parts: Vec<(String, usize, usize)>) {
    found.uses(parts.iter().map(|part| part.0.as_str()));
    let place = VectorPlace {
        shape,
        parts,
        add: 0.0,
    };
    found.vectors.insert(name, place);
}
