//! The few tokens of a vocabulary that one is drawn from, and what all others come to: what is needed of logits, where they lie
//! far from who draws.

/// Most candidates of a row.
pub const MOST_CANDIDATES: usize = 256;

/// Most tokens of a row whose logits are changed.
pub const MOST_EDITS: usize = 16 << 10;

/// Tokens whose weight is below 2^-40 of the largest are never drawn. A whole vocabulary of them has a probability of less than one
/// in a million, and their exponentials would take most of the time.
pub const NEGLIGIBLE: f32 = -40.0 * std::f32::consts::LN_2;

/// Candidates are all tokens of the foremost of so many classes, as long as they are few enough.
const CLASSES: usize = 2048;
/// Classes in one natural unit of logits.
const CLASSES_PER_UNIT: f32 = 32.0;

/// What is asked of a row of logits.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selection {
    /// What logits are divided by, from 0 on. 0 asks for the likeliest token alone.
    pub temperature: f32,
    /// The raw distribution as well.
    pub logprobs: bool,
    /// Changes, in the order of their tokens, each of another one; at most [`MOST_EDITS`].
    pub edits: Vec<Edit>,
    /// Tokens that may come, a bit each, the first ones in the lowest bits; `None` is all.
    pub allowed: Option<Vec<u32>>,
}

/// How the logit of a token is changed: first `bias` is added, then `repetition` divides a positive one and multiplies a negative one,
/// then `minus` is taken away.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Edit {
    /// The token.
    pub id: u32,
    /// Minus infinity forbids it.
    pub bias: f32,
    /// 1 is off.
    pub repetition: f32,
    /// 0 is off.
    pub minus: f32,
}

impl Edit {
    /// Changes nothing.
    pub fn of(id: u32) -> Self {
        Self { id, bias: 0.0, repetition: 1.0, minus: 0.0 }
    }

    /// The changed logit.
    pub fn apply(&self, logit: f32) -> f32 {
        let logit = logit + self.bias;
        let logit = match self.repetition {
            1.0 => logit,
            penalty if logit > 0.0 => logit / penalty,
            penalty => logit * penalty,
        };
        logit - self.minus
    }
}

impl Selection {
    /// Makes tokens impossible.
    pub fn forbid(&mut self, ids: &[u32]) {
        for &id in ids {
            let at = match self.edits.binary_search_by_key(&id, |edit| edit.id) {
                Ok(at) => at,
                Err(at) => {
                    self.edits.insert(at, Edit::of(id));
                    at
                }
            };
            self.edits[at].bias = f32::NEG_INFINITY;
        }
    }

    /// Whether all tokens may come, with their own logits.
    pub fn is_plain(&self) -> bool {
        self.edits.is_empty() && self.allowed.is_none()
    }

    /// Whether a token may come.
    fn allows(&self, id: u32) -> bool {
        let bit =
            |words: &Vec<u32>| words.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1);
        self.allowed.as_ref().is_none_or(bit)
    }

    /// Whether more than the likeliest token is asked for.
    pub(crate) fn wants_list(&self) -> bool {
        self.temperature > 0.0 || self.logprobs
    }

    /// What exponents are divided by.
    pub(crate) fn divisor(&self) -> f32 {
        if self.temperature > 0.0 { self.temperature } else { 1.0 }
    }

    /// Changes the logits `[vocab_size]` of a whole row as asked: what may not come becomes minus infinity.
    pub fn write(&self, logits: &mut [f32]) {
        for edit in &self.edits {
            if let Some(logit) = logits.get_mut(edit.id as usize) {
                *logit = edit.apply(*logit);
            }
        }
        if self.allowed.is_some() {
            for (_, logit) in (0..).zip(logits.iter_mut()).filter(|(id, _)| !self.allows(*id)) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    /// Tokens that may come, with their changed logits.
    fn changed(&self, logits: &[f32], first: u32) -> impl Iterator<Item = (u32, f32)> {
        let mut edits = self.edits.iter().skip_while(move |edit| edit.id < first).peekable();
        (first..).zip(logits).filter_map(move |(id, &logit)| {
            let edit = edits.next_if(|edit| edit.id == id);
            self.allows(id).then(|| (id, edit.map_or(logit, |edit| edit.apply(logit))))
        })
    }
}

/// What a row of logits, or a rank's part of one, comes to.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidates {
    /// The first token whose logit is NaN or infinity, with that: there is nothing to draw from.
    pub fault: Option<(u32, f32)>,
    /// The likeliest token that is allowed, the smallest of equal ones, with its changed logit; `None` where none is allowed.
    pub best: Option<(u32, f32)>,
    /// Tokens with their changed logits, likeliest first, of equal ones the smaller id; at most [`MOST_CANDIDATES`] of each part. None where
    /// only the likeliest was asked for.
    pub list: Vec<(u32, f32)>,
    /// The largest changed logit that is not in the list; minus infinity where there is none.
    pub floor: f32,
    /// Sum of `exp((logit - best) / temperature)` over the tokens that are not in the list and not [`NEGLIGIBLE`].
    pub rest: f64,
    /// The largest of the unchanged logits.
    pub raw_largest: f32,
    /// Sum of `exp(logit - raw_largest)` over all unchanged logits, where log-probabilities are asked for.
    pub raw_sum: f64,
}

impl Candidates {
    /// Reads them off `logits`, those of the tokens from `first` on.
    pub fn choose(logits: &[f32], first: u32, selection: &Selection) -> Self {
        let changed = || selection.changed(logits, first);
        let mut chosen = Self {
            fault: (first..)
                .zip(logits.iter().copied())
                .find(|(_, logit)| logit.is_nan() || *logit == f32::INFINITY),
            best: changed().reduce(|best, next| if next.1 > best.1 { next } else { best }),
            list: Vec::new(),
            floor: f32::NEG_INFINITY,
            rest: 0.0,
            raw_largest: logits.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            raw_sum: 0.0,
        };
        if selection.logprobs {
            let largest = chosen.raw_largest;
            chosen.raw_sum = logits.iter().map(|logit| f64::from((logit - largest).exp())).sum();
        }
        let Some((_, largest)) = chosen.best.filter(|(_, logit)| logit.is_finite() && selection.wants_list())
        else {
            return chosen;
        };
        let mut counts = vec![0; CLASSES];
        for (_, logit) in changed() {
            counts[class(largest, logit)] += 1;
        }
        let mut sum = 0;
        let fits = |count: &&usize| {
            sum += **count;
            sum <= MOST_CANDIDATES
        };
        // The last class has no end.
        let classes = counts[..CLASSES - 1].iter().take_while(fits).count();
        for (id, logit) in changed() {
            if class(largest, logit) < classes {
                chosen.list.push((id, logit));
            } else {
                chosen.leave(logit, largest, selection.divisor());
            }
        }
        sort(&mut chosen.list);
        chosen
    }

    /// What the parts of a row come to together, given in the order of their tokens. Every token of the list is likelier than all that are
    /// not in it.
    ///
    /// # Panics
    /// On no parts.
    #[must_use]
    pub fn merge(parts: &[Self], selection: &Selection) -> Self {
        let best = parts.iter().filter_map(|part| part.best);
        let best = best.reduce(|best, next| if next.1 > best.1 { next } else { best });
        let raw_largest = parts.iter().map(|part| part.raw_largest).fold(f32::NEG_INFINITY, f32::max);
        let fault = parts.iter().find_map(|part| part.fault);
        let floor = parts.iter().map(|part| part.floor).fold(f32::NEG_INFINITY, f32::max);
        let mut whole = Self { fault, best, list: Vec::new(), floor, rest: 0.0, raw_largest, raw_sum: 0.0 };
        let largest = best.map_or(f32::NEG_INFINITY, |(_, logit)| logit);
        for part in parts {
            if let Some((_, own)) = part.best.filter(|_| part.rest > 0.0) {
                whole.rest += part.rest * f64::from((own - largest) / selection.divisor()).exp();
            }
            if part.raw_sum > 0.0 {
                whole.raw_sum += part.raw_sum * f64::from(part.raw_largest - raw_largest).exp();
            }
            whole.list.extend(&part.list);
        }
        sort(&mut whole.list);
        let certain = whole.list.partition_point(|(_, logit)| *logit > floor);
        for (_, logit) in whole.list.split_off(certain) {
            whole.leave(logit, largest, selection.divisor());
        }
        whole
    }

    /// Counts a token that is not in the list.
    fn leave(&mut self, logit: f32, largest: f32, divisor: f32) {
        self.floor = self.floor.max(logit);
        let exponent = (logit - largest) / divisor;
        if exponent > NEGLIGIBLE {
            self.rest += f64::from(exponent.exp());
        }
    }
}

/// Larger logits first, of equal ones the smaller id.
fn likelier(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Puts the likeliest first.
pub(crate) fn sort(list: &mut [(u32, f32)]) {
    list.sort_unstable_by(likelier);
}

/// Which class a logit is in, counted from the largest.
fn class(largest: f32, logit: f32) -> usize {
    // Saturates, and makes 0 of what is no number; that is a fault anyway.
    (((largest - logit) * CLASSES_PER_UNIT) as usize).min(CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn() -> Selection {
        Selection { temperature: 0.7, logprobs: true, ..Selection::default() }
    }

    /// Values that repeat and spread.
    fn logits(len: usize, spread: f32) -> Vec<f32> {
        (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 16) as f32 / 65536.0 * spread).collect()
    }

    #[test]
    fn parts_come_to_what_the_row_comes_to() {
        for spread in [0.5, 8.0, 90.0, 4000.0] {
            let row = logits(3000, spread);
            let mut allowed = vec![0x7ff7_ffffu32; 3000 / 32];
            allowed[3] = 0;
            let edits = [2, 700, 1999, 2999].map(|id| Edit { bias: spread, minus: 0.25, ..Edit::of(id) });
            for selection in [
                drawn(),
                Selection { edits: edits.to_vec(), ..drawn() },
                Selection { edits: edits.to_vec(), allowed: Some(allowed.clone()), ..drawn() },
                Selection::default(),
            ] {
                let whole = Candidates::choose(&row, 0, &selection);
                let parts = [0..1000, 1000..1001, 1001..3000]
                    .map(|ids| Candidates::choose(&row[ids.clone()], ids.start as u32, &selection));
                let merged = Candidates::merge(&parts, &selection);
                assert_eq!(
                    (merged.best, merged.fault, merged.raw_largest),
                    (whole.best, None, whole.raw_largest)
                );
                // Each is a beginning of the same order.
                let common = whole.list.len().min(merged.list.len());
                assert_eq!(whole.list[..common], merged.list[..common], "{spread}");
                let weight =
                    |(_, logit): &(u32, f32)| f64::from(((logit - whole.best.unwrap().1) / 0.7).exp());
                let all = |c: &Candidates| c.rest + c.list.iter().map(weight).sum::<f64>();
                assert!(
                    (all(&whole) - all(&merged)).abs() <= 1e-5 * all(&whole),
                    "{} {}",
                    all(&whole),
                    all(&merged)
                );
                assert!((whole.raw_sum - merged.raw_sum).abs() <= 1e-5 * whole.raw_sum);
                assert!(merged.list.iter().all(|(_, logit)| *logit > merged.floor));
            }
        }
    }

    #[test]
    fn the_list_is_every_token_above_the_floor() {
        for (len, spread) in [(1, 1.0), (200, 1.0), (257, 1.0), (5000, 20.0), (5000, 300.0)] {
            let row = logits(len, spread);
            let chosen = Candidates::choose(&row, 7, &drawn());
            let mut order: Vec<(u32, f32)> = (7..).zip(row).collect();
            order.sort_by(likelier);
            assert!(chosen.list.len() <= MOST_CANDIDATES);
            assert!(
                len > MOST_CANDIDATES || spread > 60.0 || chosen.list.len() == len,
                "{}",
                chosen.list.len()
            );
            assert_eq!(chosen.list, order[..chosen.list.len()]);
            let floor = order.get(chosen.list.len()).map_or(f32::NEG_INFINITY, |(_, logit)| *logit);
            assert_eq!(chosen.floor, floor);
            assert_eq!(chosen.best, Some(order[0]));
        }
        // More equals than a list has room for.
        let chosen = Candidates::choose(&[1.5; 1000], 0, &drawn());
        assert_eq!((chosen.list.len(), chosen.floor, chosen.best), (0, 1.5, Some((0, 1.5))));
        assert!((chosen.rest - 1000.0).abs() < 1e-6);
    }

    #[test]
    fn changes_come_in_their_order_and_before_what_is_allowed() {
        let edit = Edit { id: 1, bias: -3.0, repetition: 2.0, minus: 0.5 };
        assert_eq!([edit.apply(5.0), edit.apply(1.0)], [0.5, -4.5]);
        let mut selection = Selection { edits: vec![edit], ..Selection::default() };
        assert!(!selection.is_plain() && Selection::default().is_plain());
        selection.forbid(&[3, 3]);
        assert_eq!(Candidates::choose(&[0.0, 6.0, 0.9, 9.0], 0, &selection).best, Some((1, 1.0)));
        let selection = Selection { allowed: Some(vec![0b1101]), ..selection };
        assert_eq!(Candidates::choose(&[0.0, 6.0, 0.9, 9.0], 0, &selection).best, Some((2, 0.9)));
        let mut row = [0.0, 6.0, 0.9, 9.0, 1.0];
        selection.write(&mut row);
        assert_eq!(row, [0.0, f32::NEG_INFINITY, 0.9, f32::NEG_INFINITY, f32::NEG_INFINITY]);
        let nothing = Selection { allowed: Some(vec![0]), temperature: 1.0, ..Selection::default() };
        let chosen = Candidates::choose(&[0.0; 40], 0, &nothing);
        assert_eq!((chosen.best, chosen.list.len(), chosen.rest), (None, 0, 0.0));
    }

    #[test]
    fn what_is_no_number_is_a_fault() {
        for wrong in [f32::NAN, f32::INFINITY] {
            let chosen = Candidates::choose(&[1.0, f32::NEG_INFINITY, wrong, wrong], 5, &drawn());
            assert_eq!(chosen.fault.unwrap().0, 7);
        }
        assert_eq!(Candidates::choose(&[1.0, f32::NEG_INFINITY], 5, &drawn()).fault, None);
    }
}
