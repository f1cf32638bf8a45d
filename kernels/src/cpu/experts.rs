//! Routed experts: tokens are grouped by expert, so that an expert's weights are read once for all of them.

use super::Weight;
use super::elementwise::SwiGlu;
use super::isa::Proven;
use super::product::{Input, Job, Onto, Product, untile};
use super::rounded::Activations;
use super::rows::Order;
use super::workers::{Workers, grown};
use crate::ExpertWeights;
use crate::shape::MoeShape;
use std::ops::Range;

/// Visits that are worked on together, if more than one expert's: what lies between their products stays small.
const VISITS: usize = 4096;

/// Which token visits which local expert, by expert, and intermediate results.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// Runs of experts that are worked on together.
    groups: Vec<Group>,
    /// One for each visited local expert: its visits, counted in its group.
    jobs: Vec<Job>,
    /// Token of each visit.
    tokens: Vec<usize>,
    /// Weight of each visit.
    weights: Vec<f32>,
    /// `[visits of a group, intermediate]`, in tiles.
    gate: Vec<f32>,
    /// `[visits of a group, intermediate]`, in tiles; then what goes down, row-major.
    up: Vec<f32>,
    /// `[T, hidden]`, in tiles.
    tiles: Vec<f32>,
    /// What comes in.
    incoming: Activations,
    /// What goes down.
    activations: Activations,
}

/// A run of experts.
#[derive(Debug, Default)]
struct Group {
    jobs: Range<usize>,
    visits: Range<usize>,
}

impl Buffers {
    /// A token's visits stay in the order of their experts, whichever other tokens there are.
    fn group(&mut self, shape: &MoeShape, choice: &[f32]) {
        self.groups.clear();
        self.groups.push(Group::default());
        self.jobs.clear();
        self.tokens.clear();
        self.weights.clear();
        let k = shape.num_experts_per_tok;
        for (local, expert) in shape.local_experts.clone().enumerate() {
            let start = self.tokens.len();
            for (token, choice) in choice.chunks_exact(2 * k).enumerate() {
                let (ids, weights) = choice.split_at(k);
                if let Some(i) = ids.iter().position(|&id| id == expert as f32) {
                    self.tokens.push(token);
                    self.weights.push(weights[i]);
                }
            }
            let len = self.tokens.len() - start;
            if len == 0 {
                continue;
            }
            if self
                .groups
                .last()
                .is_some_and(|group| !group.jobs.is_empty() && start + len - group.visits.start > VISITS)
            {
                self.groups.push(Group { jobs: self.jobs.len()..self.jobs.len(), visits: start..start });
            }
            let group = self.groups.last_mut().expect("the first one is there");
            self.jobs.push(Job { expert: local, start: start - group.visits.start, len });
            group.jobs.end = self.jobs.len();
            group.visits.end = start + len;
        }
    }
}

/// `out` `[rows, hidden]`; arguments as in [`crate::Backend::experts`].
#[expect(clippy::too_many_arguments, reason = "the operation's own arguments and what it works with")]
pub(super) fn experts(
    isa: Proven,
    workers: &Workers,
    buffers: &mut Buffers,
    shape: &MoeShape,
    experts: &ExpertWeights<Weight>,
    x: &[f32],
    choice: &[f32],
    rows: usize,
    out: &mut [f32],
) {
    buffers.group(shape, &choice[..rows * 2 * shape.num_experts_per_tok]);
    let Buffers { groups, jobs, tokens, weights, gate, up, tiles, incoming, activations } = buffers;
    let width = shape.intermediate;
    let mut rounding = None;
    for (i, Group { jobs: of_group, visits }) in groups.iter().enumerate() {
        let (jobs, tokens) = (&jobs[of_group.clone()], &tokens[visits.clone()]);
        let (weights, visits) = (&weights[visits.clone()], visits.len());
        let gate = grown(gate, visits * width);
        let up = grown(up, visits * width);
        for (w, out) in [(&experts.gate, &mut *gate), (&experts.up, &mut *up)] {
            // Both take the same activations unless their types differ.
            let x = match rounding == Some(w.rounding()) {
                true => Input::again(w, x, incoming),
                false => Input::new(isa, workers, w, x, rows, incoming),
            };
            rounding = Some(w.rounding());
            let (x, outputs) = (x.listed(tokens), Order::Same);
            let onto = Onto::Zeros;
            Product { w, x, jobs, out_rows: visits, outputs, factors: None, onto }.tiles(isa, workers, out);
        }
        let len = width.max(1);
        workers.chunks(gate, len, visits * width * 8, |i, gate, _| {
            let up = &up[i * len..][..gate.len()];
            isa.run(SwiGlu { up }, gate);
        });
        untile(workers, gate, [visits, width], up);

        let down = Product {
            w: &experts.down,
            x: Input::new(isa, workers, &experts.down, up, visits, activations),
            jobs,
            out_rows: rows,
            outputs: Order::Listed(tokens),
            factors: Some(weights),
            onto: if i == 0 { Onto::Zeros } else { Onto::Sums },
        };
        let sums = if rows == 1 { &mut *out } else { grown(tiles, rows * shape.hidden) };
        down.tiles(isa, workers, sums);
    }
    if rows != 1 {
        untile(workers, &tiles[..rows * shape.hidden], [rows, shape.hidden], out);
    }
}
