//! Rotary frequencies with their scaling resolved, as HF transformers 5.24 computes them (`modeling_rope_utils.py`).

use super::Keys;
use crate::Error;
use formats::config::{RopeConfig, RopePairing};
use std::f64::consts::PI;

const DEFAULT_BETA_FAST: f32 = 32.0;
const DEFAULT_BETA_SLOW: f32 = 1.0;
/// GGUF stores `0.1 * mscale_all_dim`.
const LOG_MULTIPLIER_UNIT: f64 = 0.1;

pub(super) struct Rope {
    pub(super) config: RopeConfig,
    /// What the softmax scale is multiplied by.
    pub(super) softmax_factor: f64,
}

/// Frequencies for `dim` rotary values of a model trained for `context` positions.
pub(super) fn rope(keys: &Keys<'_>, dim: usize, context: usize) -> Result<Rope, Error> {
    let base = keys.optional_f32("rope.freq_base")?;
    // 10000 is llama.cpp's default and wrong by orders of magnitude for half of these models.
    let base = base.ok_or_else(|| keys.refuse("rope.freq_base", "the model's rope theta", "no such key"))?;
    if base <= 1.0 {
        return Err(keys.refuse("rope.freq_base", "a number above 1", base.to_string()));
    }
    let periods = periods(base, dim);
    let plain = || periods.iter().map(|p| 1.0 / p);
    match scaling(keys)? {
        Scaling::None => Ok(resolved(plain().collect(), 1.0, 1.0)),
        Scaling::Linear { factor } => Ok(resolved(plain().map(|f| f / factor).collect(), 1.0, 1.0)),
        Scaling::Yarn { factor } => yarn(keys, &periods, f64::from(base), dim, factor, context),
    }
}

enum Scaling {
    None,
    Linear { factor: f32 },
    Yarn { factor: f32 },
}

fn scaling(keys: &Keys<'_>) -> Result<Scaling, Error> {
    let factor_key = if keys.optional_f32("rope.scaling.factor")?.is_some() {
        "rope.scaling.factor"
    } else {
        "rope.scale_linear"
    };
    let given = keys.optional_f32(factor_key)?;
    let kind = keys.optional_str("rope.scaling.type")?;
    match (kind, given) {
        (Some("yarn"), None) => {
            return Err(keys.refuse("rope.scaling.factor", "a factor for YaRN", "no such key"));
        }
        (None, Some(factor)) if factor != 0.0 && factor != 1.0 => {
            let expected = format!("none, linear or yarn, because there is a {factor_key}");
            return Err(keys.refuse("rope.scaling.type", expected, "no such key"));
        }
        _ => {}
    }
    let factor = match given.unwrap_or(0.0) {
        0.0 => 1.0,
        factor if factor > 0.0 => factor,
        factor => return Err(keys.refuse(factor_key, "a number above 0", factor.to_string())),
    };
    // Multipliers that would change the result and that no published model of these architectures has.
    for key in ["rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"] {
        if let Some(other) = keys.optional_f32(key)?.filter(|&x| x != 1.0) {
            return Err(keys.refuse(key, "1 or no such key", other.to_string()));
        }
    }
    match kind.unwrap_or("linear") {
        "none" => Ok(Scaling::None),
        "linear" if factor == 1.0 => Ok(Scaling::None),
        "linear" => Ok(Scaling::Linear { factor }),
        "yarn" => Ok(Scaling::Yarn { factor }),
        other => Err(keys.refuse("rope.scaling.type", "none, linear or yarn", other)),
    }
}

/// `base^(2i/dim)` for each pair i. Rounded where HF's f32 tensors are, so that angles agree at any position; the power
/// itself is computed in f64, so it can differ from another f32 power in the last bit.
fn periods(base: f32, dim: usize) -> Vec<f32> {
    (0..dim / 2).map(|pair| f64::from(base).powf(f64::from(2.0 * pair as f32 / dim as f32)) as f32).collect()
}

fn resolved(inv_freq: Vec<f32>, attention_scaling: f64, softmax_factor: f64) -> Rope {
    let config = RopeConfig {
        inv_freq,
        pairing: RopePairing::Interleaved,
        attention_scaling: attention_scaling as f32,
    };
    Rope { config, softmax_factor }
}

/// YaRN (arXiv 2309.00071) with HF's rounding of the correction range.
///
/// GGUF keeps `mscale_all_dim` alone, and every published model has `mscale` equal to it: then cos and sin are not scaled and
/// the softmax scale is multiplied by the square. Without it cos and sin carry the factor, as in HF.
fn yarn(
    keys: &Keys<'_>,
    periods: &[f32],
    base: f64,
    dim: usize,
    factor: f32,
    context: usize,
) -> Result<Rope, Error> {
    let original = keys.optional("rope.scaling.original_context_length")?.unwrap_or(context);
    if original == 0 {
        return Err(keys.refuse("rope.scaling.original_context_length", "a number above 0", "0"));
    }
    let beta = |key: &str, default: f32| match keys.optional_f32(key)?.unwrap_or(default) {
        beta if beta > 0.0 => Ok(f64::from(beta)),
        beta => Err(keys.refuse(key, "a number above 0", beta.to_string())),
    };
    let fast = beta("rope.scaling.yarn_beta_fast", DEFAULT_BETA_FAST)?;
    let slow = beta("rope.scaling.yarn_beta_slow", DEFAULT_BETA_SLOW)?;
    // The dimension that makes this many turns over the original context.
    let correction =
        |turns: f64| dim as f64 * (original as f64 / (turns * 2.0 * PI)).ln() / (2.0 * base.ln());
    let low = correction(fast).floor().max(0.0);
    let high = correction(slow).ceil().min(dim as f64 - 1.0);
    let width = if high == low { 0.001 } else { high - low };
    let inv_freq = periods
        .iter()
        .enumerate()
        .map(|(pair, &period)| {
            let ramp = ((pair as f32 - low as f32) / width as f32).clamp(0.0, 1.0);
            let kept = 1.0 - ramp;
            1.0 / (factor * period) * (1.0 - kept) + 1.0 / period * kept
        })
        .collect();
    let factor = f64::from(factor);
    let all_dim =
        keys.optional_f32("rope.scaling.yarn_log_multiplier")?.map_or(0.0, f64::from) / LOG_MULTIPLIER_UNIT;
    let mscale = |m: f64| if factor <= 1.0 { 1.0 } else { LOG_MULTIPLIER_UNIT * m * factor.ln() + 1.0 };
    if all_dim == 0.0 {
        return Ok(resolved(inv_freq, mscale(1.0), 1.0));
    }
    Ok(resolved(inv_freq, 1.0, mscale(all_dim).powi(2)))
}
