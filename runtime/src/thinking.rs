//! An end to reasoning: after so many tokens the token that closes it is the only one that may come.

use crate::text::Opening;

/// White space before reasoning is a token or two.
const BLANKS: usize = 3;

/// How much more an answer may think.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThinkingBudget {
    state: State,
    /// Tokens of reasoning that are left.
    left: usize,
    /// What closes reasoning.
    end: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It may be opened by this token, which white space may come before: so many tokens of it at most.
    Before {
        start: Option<u32>,
        blanks: usize,
    },
    Open,
    Over,
}

impl ThinkingBudget {
    /// `budget` tokens of reasoning for an answer that begins as `opening` says. `start` opens reasoning where that is one
    /// token, `end` closes it.
    pub fn new(budget: usize, opening: Opening, start: Option<u32>, end: u32) -> Self {
        let state = match opening {
            Opening::Plain => State::Over,
            Opening::InReasoning => State::Open,
            Opening::MayReason => State::Before { start, blanks: BLANKS },
        };
        Self { state, left: budget, end }
    }

    /// The token that must come next.
    pub fn forced(&self) -> Option<u32> {
        (self.state == State::Open && self.left == 0).then_some(self.end)
    }

    /// Takes note of a token.
    pub fn observe(&mut self, token: u32) {
        self.state = match self.state {
            State::Before { start, .. } if start == Some(token) => State::Open,
            State::Before { start, blanks } if blanks > 0 => State::Before { start, blanks: blanks - 1 },
            State::Open if token != self.end => {
                self.left = self.left.saturating_sub(1);
                State::Open
            }
            _ => State::Over,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u32 = 1;
    const END: u32 = 2;

    fn budget(budget: usize, opening: Opening) -> ThinkingBudget {
        ThinkingBudget::new(budget, opening, Some(START), END)
    }

    #[test]
    fn the_end_is_forced_when_the_budget_is_used() {
        let mut open = budget(2, Opening::InReasoning);
        for token in [7, 8] {
            assert_eq!(open.forced(), None);
            open.observe(token);
        }
        assert_eq!(open.forced(), Some(END));
        open.observe(END);
        assert_eq!(open.forced(), None, "content is not bounded");
        open.observe(START);
        assert_eq!(open.forced(), None, "nor is what looks like reasoning in it");
        assert_eq!(budget(0, Opening::InReasoning).forced(), Some(END));
    }

    #[test]
    fn reasoning_that_ends_by_itself_is_left_alone() {
        let mut open = budget(2, Opening::InReasoning);
        open.observe(7);
        open.observe(END);
        (0..5).for_each(|_| open.observe(7));
        assert_eq!(open.forced(), None);
    }

    #[test]
    fn only_an_answer_that_opens_its_reasoning_first_is_bounded() {
        let mut opens = budget(0, Opening::MayReason);
        assert_eq!(opens.forced(), None);
        opens.observe(5);
        opens.observe(START);
        assert_eq!(opens.forced(), Some(END));
        let mut plain = budget(0, Opening::MayReason);
        (0..=BLANKS).for_each(|_| plain.observe(5));
        plain.observe(START);
        assert_eq!(plain.forced(), None);
        assert_eq!(budget(0, Opening::Plain).forced(), None);
    }
}
