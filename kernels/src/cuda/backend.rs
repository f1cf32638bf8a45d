//! The operations, and which kernels each of them takes.

use super::attention::{self, Attention};
use super::candidates::{Chooser, MOST_WIDTH};
use super::decode::Moe;
use super::driver::Memory;
use super::kernels::{Queries, Store};
use super::weight::{Storage, storage};
use super::{Buffer, Cache, Cuda, MOST_ROWS, Pieces, Recording, Scratch, Tiling, Weight};
use crate::backend::{candidates_by_host, moe_in_parts};
use crate::candidates::{Candidates, Selection};
use crate::shape::{MlaShape, MoeShape};
use crate::step::{BLOCK_TOKENS, Step};
use crate::{Backend, Error, ExpertWeights, MlpWeights, MoeBuffers, MoeWeights, Pass, StepLimits, StepRows};
use formats::{Dtype, TensorView};
use half::f16;
use std::ops::Range;
use zerocopy::IntoBytes;

impl Backend for Cuda {
    type Weight = Weight;
    type Buffer = Buffer;
    type Cache = Cache;

    fn weight(&self, view: TensorView) -> Result<Weight, Error> {
        self.tiled_weight(&view, Tiling::Rows)
    }

    fn scaled_weight(&self, view: TensorView, scales: &[f32]) -> Result<Weight, Error> {
        let weight = Weight::scaled(&self.stream, &view, scales)?;
        self.prepare(weight.form)?;
        Ok(weight)
    }

    fn keeps(&self, dtype: Dtype) -> bool {
        storage(dtype, false) == Storage::Own
    }

    fn zeros(&self, len: usize) -> Result<Buffer, Error> {
        let buffer = Buffer::new(self.stream.device(), len, "activations")?;
        self.stream.zero(&buffer.memory);
        Ok(buffer)
    }

    fn cache(&mut self, slots: usize, width: usize) -> Result<Cache, Error> {
        let all = slots + BLOCK_TOKENS;
        let memory = Memory::new(self.stream.device(), all * width * 2, "the latent cache")?;
        self.stream.zero(&memory);
        if slots.is_multiple_of(BLOCK_TOKENS) {
            self.step.spare(slots / BLOCK_TOKENS);
        }
        Ok(Cache { memory, slots: all, width })
    }

    fn write(&mut self, buffer: &mut Buffer, values: &[f32]) {
        self.settle(&[buffer]);
        buffer.holds(values.len());
        // It may be the one that they were made of.
        self.prepared.of = None;
        self.stream.write(&buffer.memory, 0, values.as_bytes());
    }

    fn read(&mut self, buffer: &Buffer, range: Range<usize>, values: &mut [f32]) {
        self.settle(&[buffer]);
        buffer.holds(range.end);
        assert_eq!(range.len(), values.len(), "room for the values");
        self.stream.read(&buffer.memory, range.start * 4, values.as_mut_bytes());
    }

    fn write_cache(&mut self, cache: &mut Cache, values: &[f32]) {
        self.settle(&[]);
        let bytes: Vec<u8> = values.iter().flat_map(|&value| cached(value).to_ne_bytes()).collect();
        self.stream.write(&cache.memory, 0, &bytes);
    }

    fn read_cache(&mut self, cache: &Cache, values: &mut [f32]) {
        self.settle(&[]);
        let mut bytes = vec![0; values.len() * 2];
        self.stream.read(&cache.memory, 0, &mut bytes);
        for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
            *value = f16::from_ne_bytes(*bytes).to_f32();
        }
    }

    fn reserve(&mut self, limits: StepLimits) -> Result<(), Error> {
        if limits.max_rows > MOST_ROWS {
            return Err(Error::StepRows { most: MOST_ROWS, found: limits.max_rows });
        }
        if self.step.limit(limits)? {
            self.forget_recordings();
        }
        Ok(())
    }

    fn prepare_attention(&mut self, shape: &MlaShape) -> Result<(), Error> {
        let Some(widths) = attention::widths(self.stream.device(), shape) else { return Ok(()) };
        if self.attention.iter().all(|known| known.widths() != widths) {
            self.attention.push(Attention::new(&self.stream, widths)?);
        }
        Ok(())
    }

    fn prepare_candidates(&mut self, ids: &Range<usize>) -> Result<(), Error> {
        if ids.len() > MOST_WIDTH {
            self.chooser = None;
            return Ok(());
        }
        let words = ids.end.div_ceil(32);
        if self.chooser.as_ref().is_none_or(|chooser| chooser.words() < words) {
            self.chooser = Some(Chooser::new(&self.stream, words)?);
        }
        Ok(())
    }

    fn begin_step(&mut self, step: &Step) -> StepRows {
        self.own_step.copy_from(step);
        self.prepared.of = None;
        self.waiting = None;
        self.storing = None;
        let begun = self.step.begin(step, &self.stream);
        if self.stream.record(begun) == Some(true) {
            self.forget_recordings();
        }
        self.step.rows()
    }

    fn begin_pass(&mut self, repeatable: bool) -> Pass {
        self.mark(0);
        let repeatable = repeatable && !self.stream.is_tracing();
        let Some(bucket) = self.step.bucket().filter(|_| repeatable) else { return Pass::Run };
        match &mut self.recordings[bucket] {
            Recording::Made(graph) => {
                self.stream.run(graph);
                self.mark(1);
                return Pass::Done;
            }
            Recording::Warm => {
                let begun = self.stream.begin_capture();
                self.recording = self.stream.record(begun).map(|()| bucket);
            }
            cold @ Recording::Cold => *cold = Recording::Warm,
        }
        Pass::Run
    }

    fn end_pass(&mut self) {
        let Some(bucket) = self.recording.take() else { return self.mark(1) };
        let ended = self.stream.end_capture();
        if let Some(graph) = self.stream.record(ended) {
            self.stream.run(&graph);
            self.recordings[bucket] = Recording::Made(graph);
        }
        self.mark(1);
    }

    fn candidates(
        &mut self,
        logits: &Buffer,
        ids: Range<usize>,
        asked: &[(usize, &Selection)],
        out: &mut Vec<Candidates>,
    ) -> Result<(), Error> {
        self.prepare_candidates(&ids)?;
        self.settle(&[logits]);
        let Some(chooser) = &mut self.chooser else {
            return candidates_by_host(self, logits, ids, asked, out);
        };
        let first = u32::try_from(ids.start).expect("token ids are 32 bits wide");
        Ok(chooser.choose(&self.stream, logits, ids.len(), first, asked, out)?)
    }

    fn finish(&mut self) -> Result<(), Error> {
        Ok(self.stream.finish()?)
    }

    fn embed(&mut self, table: &Weight, first_row: usize, out: &mut Buffer) {
        self.settle(&[out]);
        self.linear(table).embed(&self.stream, table, &self.step, first_row, out);
    }

    fn rms_norm(&mut self, x: &Buffer, rows: usize, weight: &Weight, eps: f32, out: &mut Buffer) {
        self.settle(&[x]);
        self.waiting = None;
        if self.norm_for_products(x, None, rows, weight, eps, out) {
            return;
        }
        self.ops.rms_norm(&self.stream, x, rows, weight, eps, out);
    }

    fn add_rms_norm(
        &mut self,
        x: &mut Buffer,
        y: &Buffer,
        rows: usize,
        width: usize,
        weight: &Weight,
        eps: f32,
        out: &mut Buffer,
    ) {
        self.settle(&[x, y]);
        self.waiting = None;
        assert_eq!(width, weight.cols, "width of the norm");
        if self.norm_for_products(x, Some(y), rows, weight, eps, out) {
            // The sum is in the other buffer: blocks read all of a row while others write theirs.
            std::mem::swap(x, &mut self.scratch.residual);
            return;
        }
        self.ops.add_rms_norm(&self.stream, x, y, rows, weight, eps, out);
    }

    fn add(&mut self, x: &mut Buffer, y: &Buffer, rows: usize, width: usize) {
        self.settle(&[x, y]);
        self.ops.add(&self.stream, x, y, rows * width);
    }

    fn matmul(&mut self, w: &Weight, x: &Buffer, rows: usize, out: &mut Buffer) {
        if self.gemm(w, rows).is_some() {
            self.settle(&[x, out]);
            return self.products(&[w], x, rows, &mut [out]);
        }
        if self.few_products(&[w], x, rows, &[out], None)
            || self.rows.f32_product(&self.stream, w, x, rows, out)
        {
            return;
        }
        self.linear(w).matmul(&self.stream, w, x, rows, out);
    }

    fn matmul_pair(&mut self, w: [&Weight; 2], x: &Buffer, rows: usize, out: [&mut Buffer; 2]) {
        if w.iter().all(|w| self.gemm(w, rows).is_some()) {
            let [first, second] = out;
            self.settle(&[x, first, second]);
            return self.products(&w, x, rows, &mut [first, second]);
        }
        if self.few_products(&w, x, rows, &[out[0], out[1]], None) {
            return;
        }
        for (w, out) in w.into_iter().zip(out) {
            self.matmul(w, x, rows, out);
        }
    }

    fn mlp(
        &mut self,
        mlp: &MlpWeights<Weight>,
        x: &Buffer,
        rows: usize,
        scratch: [&mut Buffer; 2],
        out: &mut Buffer,
    ) {
        let [gate, up] = scratch;
        self.matmul_pair([&mlp.gate_proj, &mlp.up_proj], x, rows, [gate, up]);
        if self.gemm(&mlp.down_proj, rows).is_none() {
            self.swiglu(gate, up, rows, mlp.width);
            return self.matmul(&mlp.down_proj, gate, rows, out);
        }
        self.settle(&[gate, up, out]);
        if self.grow_halves(rows, mlp.width) {
            self.rows.swiglu_to_half(&self.stream, [gate, up], rows, mlp.width, &self.scratch.halves);
            self.products_of_halves(&[&mlp.down_proj], rows, &mut [out]);
        }
    }

    fn rms_norm_matmul(
        &mut self,
        x: &Buffer,
        rows: usize,
        (norm, eps): (&Weight, f32),
        w: &Weight,
        scratch: &mut Buffer,
        out: &mut Buffer,
    ) {
        if !self.few_products(&[w], x, rows, &[out], Some((norm, eps))) {
            self.rms_norm(x, rows, norm, eps, scratch);
            self.matmul(w, scratch, rows, out);
        }
    }

    fn moe(
        &mut self,
        weights: &MoeWeights<Weight>,
        x: &Buffer,
        rows: usize,
        buffers: &mut MoeBuffers<Buffer>,
        out: &mut Buffer,
    ) {
        let MoeWeights { shape, gate, e_score_correction_bias, experts, shared } = weights;
        let width =
            shape.num_experts_per_tok * shape.intermediate + shared.as_ref().map_or(0, |mlp| mlp.width);
        if self.few(rows).is_some() && self.grow(|scratch| &mut scratch.visits[0], rows.max(4) * width) {
            let moe =
                Moe { shape, gate, bias: e_score_correction_bias.as_ref(), experts, shared: shared.as_ref() };
            if self.one_moe(&moe, x, rows, &buffers.router_logits, out) {
                return;
            }
            self.settle(&[x]);
            let working = [&buffers.router_logits, &self.scratch.visits[0]];
            let done = self
                .few(rows)
                .is_some_and(|d| d.moe(&self.stream, &moe, x, rows, working, &self.prepared, out));
            if done {
                return;
            }
        }
        self.settle(&[x]);
        moe_in_parts(self, weights, x, rows, buffers, out);
    }

    fn swiglu(&mut self, gate: &mut Buffer, up: &Buffer, rows: usize, width: usize) {
        self.settle(&[gate, up]);
        self.ops.swiglu(&self.stream, gate, up, rows * width);
    }

    fn mla_store(
        &mut self,
        shape: &MlaShape,
        kv: &Buffer,
        kv_norm: &Weight,
        q: &mut Buffer,
        cache: &mut Cache,
    ) {
        self.settle(&[kv, q]);
        let Some(table) = self.inv_freq(&shape.rotary.inv_freq) else { return };
        let rows = self.step.rows().rows;
        let queries = Queries::new(shape, &self.step, q);
        let store = Store::new(shape, &self.step, &self.rotary[table].1, kv, kv_norm, cache);
        let fast =
            self.attention_for(shape).is_some() && Attention::stores(&self.own_step, rows, shape.heads);
        if fast {
            self.storing = Some((store, queries));
        } else {
            self.ops.mla_store(&self.stream, &self.step, &store, queries);
        }
    }

    fn mla_attention(
        &mut self,
        shape: &MlaShape,
        q: &Buffer,
        kv_b: &Weight,
        cache: &Cache,
        out: &mut Buffer,
    ) {
        self.settle_norm(&[q, out]);
        assert_eq!([kv_b.rows, kv_b.cols], [shape.kv_b_rows(), shape.kv_lora], "kv_b_proj's shape");
        let rows = self.step.rows().rows;
        let fast = self.attention_for(shape).filter(|_| Attention::takes(kv_b));
        if let Some(fast) = fast {
            let own = |(store, queries): &mut (Store, Queries)| {
                queries.address == q.address() && store.is_in(cache)
            };
            let store = self.storing.take_if(own).map_or(Store::DONE, |(store, _)| store);
            self.settle(&[]);
            let sizes = self.attention[fast].sizes(shape.heads, &self.own_step, rows);
            let grown = self.grow(|scratch| &mut scratch.pieces.absorbed, sizes[0])
                && self.grow(|scratch| &mut scratch.pieces.part, sizes[1])
                && self.grow(|scratch| &mut scratch.pieces.softmax, sizes[2])
                && self.grow(|scratch| &mut scratch.pieces.keys, sizes[3])
                && self.grow(|scratch| &mut scratch.pieces.values, sizes[4])
                && self.grow(|scratch| &mut scratch.pieces.state, sizes[5]);
            if grown {
                let (memory, pieces): (_, &Pieces) = (&self.step, &self.scratch.pieces);
                let (attention, step) = (&self.attention[fast], &self.own_step);
                attention.run(&self.stream, shape, step, memory, q, kv_b, cache, pieces, &store, out);
            }
            return;
        }
        self.settle(&[q, out]);
        let heads = rows * shape.heads;
        if !self.grow(|scratch| &mut scratch.queries, heads * shape.cache_width())
            || !self.grow(|scratch| &mut scratch.latents, heads * shape.kv_lora)
        {
            return;
        }
        let Scratch { queries, latents, .. } = &self.scratch;
        let linear = self.linear(kv_b);
        linear.absorb(&self.stream, shape, kv_b, q, rows, queries);
        self.ops.attend(&self.stream, shape, &self.step, queries, cache, latents);
        linear.project(&self.stream, shape, kv_b, latents, rows, out);
    }

    fn route(
        &mut self,
        shape: &MoeShape,
        logits: &Buffer,
        bias: Option<&Weight>,
        rows: usize,
        choice: &mut Buffer,
    ) {
        self.settle(&[logits, choice]);
        self.ops.route(&self.stream, shape, logits, bias, rows, choice);
    }

    fn experts(
        &mut self,
        shape: &MoeShape,
        experts: &ExpertWeights<Weight>,
        x: &Buffer,
        choice: &Buffer,
        rows: usize,
        out: &mut Buffer,
    ) {
        self.settle(&[x, choice, out]);
        let visits = rows * shape.num_experts_per_tok * shape.intermediate;
        if !self.grow(|scratch| &mut scratch.visits[0], visits)
            || !self.grow(|scratch| &mut scratch.visits[1], visits)
        {
            return;
        }
        let ExpertWeights { gate, up, down } = experts;
        if [gate, up, down].iter().all(|w| self.gemm(w, rows).is_some()) {
            return self.experts_of_many(shape, experts, [x, choice, out], rows);
        }
        let (stream, [inner, other]) = (&self.stream, &self.scratch.visits);
        self.linear(gate).expert_in(stream, shape, gate, [x, choice, inner], rows);
        self.linear(up).expert_in(stream, shape, up, [x, choice, other], rows);
        self.ops.swiglu(stream, inner, other, visits);
        self.linear(down).expert_out(stream, shape, down, [inner, choice, out], rows);
    }

    fn gather_logit_rows(&mut self, x: &Buffer, width: usize, out: &mut Buffer) {
        self.settle(&[x, out]);
        self.ops.gather(&self.stream, x, &self.step, width, out);
    }
}

/// A value as the cache keeps it, as in prelude.cuh.
fn cached(value: f32) -> f16 {
    f16::from_f32(value.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}
