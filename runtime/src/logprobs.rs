//! Log-probabilities of tokens, as the model itself has them: before any temperature, bias, penalty or grammar.

use kernels::candidates::Candidates;

/// How likely a token was, and which were likeliest in its place.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token.
    pub token: u32,
    /// Its natural log-probability.
    pub logprob: f32,
    /// One more than the number of likelier tokens.
    pub rank: usize,
    /// The likeliest tokens with theirs, likeliest first; as many as were asked for.
    pub top: Vec<(u32, f32)>,
}

/// Reads `token`'s log-probability and the `top` likeliest ones off the logits `[vocab_size]`. Of equal ones the smaller id
/// comes first.
///
/// # Panics
/// On a token that has no logit.
pub fn logprobs(logits: &[f32], token: u32, top: usize) -> TokenLogprobs {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    let normaliser = f64::from(largest) + sum.ln();
    let logprob = |id: u32| (f64::from(logits[id as usize]) - normaliser) as f32;
    let likelier =
        |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then_with(|| a.cmp(b));
    let mut ids: Vec<u32> = Vec::new();
    if top > 0 {
        ids.extend(0..u32::try_from(logits.len()).expect("token ids are 32 bits wide"));
        if top < ids.len() {
            ids.select_nth_unstable_by(top, likelier);
            ids.truncate(top);
        }
        ids.sort_unstable_by(likelier);
    }
    TokenLogprobs {
        token,
        logprob: logprob(token),
        rank: 1 + logits.iter().filter(|&&logit| logit > logits[token as usize]).count(),
        top: ids.into_iter().map(|id| (id, logprob(id))).collect(),
    }
}

/// [`logprobs`] of a row whose candidates are all that is known: chosen of unchanged logits, with their sum. `None` where the token or
/// one of the likeliest is not among them.
pub fn candidate_logprobs(candidates: &Candidates, token: u32, top: usize) -> Option<TokenLogprobs> {
    let Candidates { list, floor, raw_largest, raw_sum, .. } = candidates;
    let logit = list.iter().find(|(id, _)| *id == token)?.1;
    if top > list.len() && *floor > f32::NEG_INFINITY {
        return None;
    }
    let normaliser = f64::from(*raw_largest) + raw_sum.ln();
    let logprob = |logit: f32| (f64::from(logit) - normaliser) as f32;
    Some(TokenLogprobs {
        token,
        logprob: logprob(logit),
        rank: 1 + list.partition_point(|(_, other)| *other > logit),
        top: list.iter().take(top).map(|&(id, logit)| (id, logprob(logit))).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::candidates::Selection;

    #[test]
    fn they_are_the_log_softmax() {
        let logits = [1.0f32, 3.0, 3.0, -1e30];
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let exact = |logit: f32| (f64::from(logit) - sum.ln()) as f32;
        let read = logprobs(&logits, 0, 3);
        assert_eq!((read.token, read.logprob, read.rank), (0, exact(1.0), 3));
        assert_eq!(logprobs(&logits, 2, 0).rank, 1);
        assert_eq!(read.top, [(1, exact(3.0)), (2, exact(3.0)), (0, exact(1.0))]);
        assert_eq!(logprobs(&logits, 2, 0).top, []);
        assert_eq!(logprobs(&logits, 2, 9).top.len(), 4);
        assert_eq!(logprobs(&[5.0], 0, 1).top, [(0, 0.0)]);
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let read = logprobs(&[1e30, 1e30], 1, 1);
        assert!((read.logprob - 0.5f32.ln()).abs() < 1e-6 || read.logprob == 0.0, "{read:?}");
    }

    #[test]
    fn candidates_have_those_of_the_row() {
        let row: Vec<f32> = (0..2000u32).map(|i| (i * 7919 % 2000) as f32 * 0.01).collect();
        let selection = Selection { logprobs: true, ..Selection::default() };
        let candidates = Candidates::choose(&row, 0, &selection);
        let last = candidates.list[candidates.list.len() - 1].0;
        for (token, top) in [(candidates.list[0].0, 5), (last, 0), (candidates.list[3].0, 20)] {
            let (found, expected) =
                (candidate_logprobs(&candidates, token, top).unwrap(), logprobs(&row, token, top));
            assert_eq!((found.token, found.rank), (expected.token, expected.rank));
            assert!((found.logprob - expected.logprob).abs() < 1e-5, "{found:?} {expected:?}");
            let ids = |of: &TokenLogprobs| of.top.iter().map(|(id, _)| *id).collect::<Vec<_>>();
            assert_eq!(ids(&found), ids(&expected));
        }
        let unlikely = row.iter().position(|&logit| logit == 0.0).unwrap() as u32;
        assert_eq!(candidate_logprobs(&candidates, unlikely, 1), None);
        assert_eq!(candidate_logprobs(&candidates, candidates.list[0].0, 1999), None);
    }
}
