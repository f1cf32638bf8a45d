//! What is read of a step's logits: whole rows, or what a token can be drawn from.

use super::{RankGroup, RankStopped};
use crate::comm::Communicator;
use crate::model::{Model, StepFault};
use kernels::Backend;
use kernels::candidates::{Candidates, Selection};
use std::sync::Arc;

/// One row of a step's logits, and how it is read.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Which, counted over the step's rows of logits.
    pub row: usize,
    /// What is read of it.
    pub how: How,
}

/// What is read of a row.
#[derive(Clone, Debug)]
pub enum How {
    /// Every logit.
    Whole,
    /// What a token can be drawn from.
    Chosen(Arc<Selection>),
}

/// A row as it was asked for.
#[derive(Debug)]
pub enum Row<'a> {
    /// `[vocab_size]`
    Whole(&'a mut [f32]),
    /// Of the whole vocabulary.
    Chosen(Candidates),
}

/// What one rank has read: its part of every row.
#[derive(Debug, Default)]
pub(super) struct Part {
    /// `[whole rows, local vocab]`
    pub(super) whole: Vec<f32>,
    /// Of chosen rows, in their order.
    pub(super) chosen: Vec<Candidates>,
}

impl Part {
    /// Reads a rank's part of the last step's logits, which waits for the step.
    pub(super) fn read<B: Backend, C: Communicator<B>>(
        &mut self,
        model: &mut Model<B, C>,
        asked: &[Asked],
    ) -> Result<(), StepFault> {
        let width = model.logit_rows().len();
        let whole = || asked.iter().filter(|asked| matches!(asked.how, How::Whole)).map(|asked| asked.row);
        self.whole.resize(whole().count() * width, 0.0);
        let (mut rest, mut rows) = (&mut self.whole[..], whole().peekable());
        while let Some(first) = rows.next() {
            let mut end = first + 1;
            while rows.next_if_eq(&end).is_some() {
                end += 1;
            }
            let (values, behind) = rest.split_at_mut((end - first) * width);
            model.read(first..end, values);
            rest = behind;
        }
        let chosen: Vec<(usize, &Selection)> = asked
            .iter()
            .filter_map(|asked| match &asked.how {
                How::Whole => None,
                How::Chosen(selection) => Some((asked.row, &**selection)),
            })
            .collect();
        self.chosen.clear();
        model.candidates(&chosen, &mut self.chosen)?;
        Ok(model.finish()?)
    }
}

impl RankGroup {
    /// Reads rows of the last step's logits, as often as wanted, in the order that they are asked for. The first time waits for the step.
    ///
    /// # Errors
    /// [`RankStopped`] naming the first rank that failed, after which every further step fails as well.
    pub fn read(&mut self, asked: Vec<Asked>) -> Result<Vec<Row<'_>>, RankStopped> {
        let asked = Arc::new(asked);
        self.order_read(&asked)?;
        let vocab_size = self.vocab_size;
        let whole = asked.iter().filter(|asked| matches!(asked.how, How::Whole)).count();
        self.logits.resize(whole * vocab_size, 0.0);
        let mut parts: Vec<Vec<Candidates>> = Vec::new();
        for handle in &self.ranks {
            let mut part = handle.part();
            let (width, start) = (handle.logit_rows.len(), handle.logit_rows.start);
            for row in 0..whole {
                self.logits[row * vocab_size + start..][..width]
                    .copy_from_slice(&part.whole[row * width..(row + 1) * width]);
            }
            parts.push(std::mem::take(&mut part.chosen));
        }
        let mut parts: Vec<_> = parts.into_iter().map(Vec::into_iter).collect();
        let mut rows = self.logits.chunks_exact_mut(vocab_size);
        let row = |asked: &Asked| match &asked.how {
            How::Whole => Row::Whole(rows.next().expect("room for every whole row")),
            How::Chosen(selection) => {
                let of_ranks: Vec<Candidates> = parts.iter_mut().filter_map(Iterator::next).collect();
                Row::Chosen(Candidates::merge(&of_ranks, selection))
            }
        };
        Ok(asked.iter().map(row).collect())
    }

    /// All rows of the last step's logits: `[logit rows, vocab_size]`.
    ///
    /// # Errors
    /// As [`RankGroup::read`].
    pub fn read_whole(&mut self) -> Result<&mut [f32], RankStopped> {
        let rows = self.batch.logit_rows().len();
        self.read((0..rows).map(|row| Asked { row, how: How::Whole }).collect())?;
        Ok(&mut self.logits)
    }
}
