//! Matrices in tiles for tensor cores: only a GPU has products with them.
#![allow(clippy::unwrap_used, reason = "the helpers of these tests are tests too")]

mod support;

use formats::layout::mma16;
use formats::{Dtype, TensorView};
use kernels::cuda::Tiling;
use kernels::reference::Reference;
use kernels::shape::MoeShape;
use kernels::step::{LogitRows, Step};
use kernels::{Backend, ExpertWeights, MlpWeights, MoeBuffers, MoeWeights};
use support::{view as view_of, *};

/// Matrices in tiles, on a GPU: what they are in rows, bit for bit, and in an embedding.
#[test]
fn tiles_are_what_their_rows_are() {
    let Some(mut gpu) = cuda() else { return };
    let b = &mut *gpu;
    let mut random = Random(23);
    for dtype in dtypes().into_iter().filter(|&dtype| mma16::tile_bytes(dtype).is_some()) {
        for [rows, cols] in [[16, 256], [48, 768], [144, 512]] {
            let view = random.weight(dtype, &[rows, cols]);
            let [in_rows, in_tiles] =
                [b.weight(view.clone()).unwrap(), b.tiled_weight(&tiled(&view), Tiling::Tiles).unwrap()];
            for tokens in [1, 3, 16, 40] {
                let x = random.values(tokens * cols);
                let x = fenced(b, &x);
                let mut product = |w| {
                    let mut out = poisoned(b, tokens * rows);
                    b.matmul(w, &x, tokens, &mut out);
                    written(b, &out, tokens * rows)
                };
                let (found, expected) = (product(&in_tiles), product(&in_rows));
                let what = format!("{dtype} [{rows}, {cols}] x {tokens}");
                // Few tokens may meet tensor cores in one of the two.
                close(&what, &found, &expected, cols + HALF_TERMS, |_| 4.0 * (cols as f32).sqrt());
            }
            let mut step = Step::default();
            step.push(&[0, 9, rows as u32 - 1], 0, &[0], LogitRows::None);
            b.begin_step(&step);
            let [found, expected] = [&in_tiles, &in_rows].map(|w| {
                let mut out = poisoned(b, 3 * cols);
                b.embed(w, 0, &mut out);
                written(b, &out, 3 * cols)
            });
            same_bits(&format!("{dtype} embedding"), &found, &expected);
        }
    }
}

/// What a layer does with few tokens: sums, norms and products, and a layer of experts.
struct FewTokens {
    /// Sums and normed sums.
    sums: [Vec<f32>; 2],
    /// Two products of the latter, and one of the norm of the first.
    products: [Vec<f32>; 3],
    moe: Vec<f32>,
}

struct FewWeights<W> {
    norms: [W; 2],
    products: [W; 3],
    moe: MoeWeights<W>,
}

fn few_tokens<B: Backend>(
    b: &mut B,
    w: &FewWeights<B::Weight>,
    x: &[f32],
    y: &[f32],
    rows: usize,
) -> FewTokens {
    let hidden = x.len() / rows;
    let [first, second, third] = [48, 256, 32];
    let (mut x, y) = (fenced(b, x), fenced(b, y));
    let (mut h, mut out) = (poisoned(b, rows * hidden), poisoned(b, rows * hidden));
    let [mut p0, mut p1, mut scratch, mut p2] =
        [first, second, second, third].map(|width| poisoned(b, rows * width));
    let shape = &w.moe.shape;
    let mut buffers = MoeBuffers {
        router_logits: poisoned(b, rows * shape.n_routed_experts),
        choice: poisoned(b, rows * 2 * shape.num_experts_per_tok),
        gate: poisoned(b, rows * 256),
        up: poisoned(b, rows * 256),
        shared: poisoned(b, rows * hidden),
    };
    b.add_rms_norm(&mut x, &y, rows, hidden, &w.norms[0], 1e-5, &mut h);
    b.matmul_pair([&w.products[0], &w.products[1]], &h, rows, [&mut p0, &mut p1]);
    b.moe(&w.moe, &h, rows, &mut buffers, &mut out);
    b.rms_norm_matmul(&p1, rows, (&w.norms[1], 1e-5), &w.products[2], &mut scratch, &mut p2);
    // A backend may have put the sums into another buffer.
    let mut sums = vec![0.0; rows * hidden];
    b.read(&x, 0..rows * hidden, &mut sums);
    FewTokens {
        sums: [sums, written(b, &h, rows * hidden)],
        products: [(p0, first), (p1, second), (p2, third)].map(|(p, width)| written(b, &p, rows * width)),
        moe: written(b, &out, rows * hidden),
    }
}

#[test]
fn few_tokens_meet_tiles() {
    let Some(mut gpu) = cuda() else { return };
    let b = &mut *gpu;
    let mut random = Random(24);
    let hidden = 512;
    let types = [Dtype::Q4_K, Dtype::Q5_K, Dtype::Q6_K, Dtype::Q8_0, Dtype::Q4_0, Dtype::Q5_0];
    for (i, &dtype) in types.iter().enumerate() {
        let other = types[(i + 1) % types.len()];
        for (rows, local, shared) in
            [(1, 0..16, true), (3, 4..12, true), (8, 0..16, false), (9, 0..16, true), (16, 0..16, true)]
        {
            let shape = MoeShape { local_experts: local, ..moe_shape(hidden, 256, [16, 4]) };
            let view = |random: &mut Random, dtype, dims: &[usize]| random.weight(dtype, dims);
            let views = FewWeights {
                norms: [hidden, 256].map(|width| view(&mut random, Dtype::F32, &[width])),
                products: [
                    view(&mut random, dtype, &[48, hidden]),
                    view(&mut random, other, &[256, hidden]),
                    view(&mut random, dtype, &[32, 256]),
                ],
                moe: MoeWeights {
                    gate: view(&mut random, Dtype::F32, &[16, hidden]),
                    e_score_correction_bias: Some(view(&mut random, Dtype::F32, &[16])),
                    experts: expert_weights(&mut random, &shape, [dtype, other]),
                    shared: shared.then(|| MlpWeights {
                        width: 256,
                        gate_proj: view(&mut random, other, &[256, hidden]),
                        up_proj: view(&mut random, dtype, &[256, hidden]),
                        down_proj: view(&mut random, dtype, &[hidden, 256]),
                    }),
                    shape,
                },
            };
            let reference = &mut Reference::new();
            let in_rows = few_weights(&views, |view| reference.weight(view.clone()).unwrap());
            let in_tiles = few_weights(&views, |view| match mma16::fits(view.dtype(), view.shape()) {
                true => b.tiled_weight(&tiled(view), Tiling::Tiles).unwrap(),
                false => b.weight(view.clone()).unwrap(),
            });
            let [x, y] = [random.values(rows * hidden), random.values(rows * hidden)];
            let expected = few_tokens(reference, &in_rows, &x, &y, rows);
            let found = few_tokens(b, &in_tiles, &x, &y, rows);
            let what = |part: &str| format!("{part} of {dtype} and {other}, {rows} rows");
            same_bits(&what("sum"), &found.sums[0], &expected.sums[0]);
            let by = |values: &[f32]| largest(values);
            close(&what("norm"), &found.sums[1], &expected.sums[1], hidden, |i| expected.sums[1][i].abs());
            for (found, expected) in found.products.iter().zip(&expected.products) {
                close(&what("product"), found, expected, 8 * HALF_TERMS, |_| by(expected));
            }
            close(&what("experts"), &found.moe, &expected.moe, 16 * HALF_TERMS, |_| by(&expected.moe));
        }
    }
}

fn few_weights<W>(views: &FewWeights<TensorView>, mut make: impl FnMut(&TensorView) -> W) -> FewWeights<W> {
    let FewWeights { norms, products, moe } = views;
    FewWeights {
        norms: norms.each_ref().map(&mut make),
        products: products.each_ref().map(&mut make),
        moe: MoeWeights {
            shape: moe.shape.clone(),
            gate: make(&moe.gate),
            e_score_correction_bias: moe.e_score_correction_bias.as_ref().map(&mut make),
            experts: ExpertWeights {
                gate: make(&moe.experts.gate),
                up: make(&moe.experts.up),
                down: make(&moe.experts.down),
            },
            shared: moe.shared.as_ref().map(|mlp| MlpWeights {
                width: mlp.width,
                gate_proj: make(&mlp.gate_proj),
                up_proj: make(&mlp.up_proj),
                down_proj: make(&mlp.down_proj),
            }),
        },
    }
}

/// The same bytes in layout `mma16.v1`.
fn tiled(view: &TensorView) -> TensorView {
    let dims: Vec<usize> = view.shape().dims().iter().map(|&d| d as usize).collect();
    let row = view.row_bytes();
    let of_tile = mma16::tile_bytes(view.dtype()).unwrap() / mma16::ROWS;
    let mut bytes = vec![0; view.bytes().len()];
    for (strip, out) in view.bytes().chunks(16 * row).zip(bytes.chunks_mut(16 * row)) {
        for (i, tile) in out.chunks_mut(16 * of_tile).enumerate() {
            let rows = std::array::from_fn(|r| &strip[r * row + i * of_tile..][..of_tile]);
            mma16::arrange(view.dtype(), &rows, tile);
        }
    }
    view_of(view.dtype(), &dims, bytes)
}
