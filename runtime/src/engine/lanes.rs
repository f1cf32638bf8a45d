//! The engine's thread: takes requests, and lets each set of weights that is in memory run its steps by turns.
//!
//! Requests go to the newest weights. Those that began on older ones end there: every set has its own ranks, scheduler and cache,
//! so nothing that one has computed can meet what another computes.

use super::worker::{Client, Submission, Worker, prepare};
use crate::metrics::{Metrics, Moment};
use crate::sequence::{SeqId, Sequence};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often it is looked whether weights that nothing runs on can go.
const LOOK: Duration = Duration::from_millis(5);

/// What the engine's thread is told.
pub(super) enum Command {
    /// A request.
    Submit(Box<Submission>),
    /// New weights: whatever has not begun goes there from now on.
    Swap(Box<Worker>, Sender<()>),
    /// Answers when one set of weights is in memory.
    Settle(Sender<()>),
    /// Begins nothing more; answers when what had begun has ended and no weights are in memory.
    Drain(Sender<()>),
    /// There are no weights any more.
    Fail(String),
    /// Ends.
    Stop,
}

pub(super) struct Lanes {
    /// `None` while weights are exchanged in place.
    newest: Option<Worker>,
    /// Oldest first.
    older: Vec<Worker>,
    /// What waits for weights.
    held: Vec<(Sequence, Client)>,
    settling: Vec<Sender<()>>,
    draining: Option<Sender<()>>,
    /// Weights on their way out of memory: that may take longer than a step.
    leaving: Vec<JoinHandle<()>>,
    next_id: u64,
    max_model_len: usize,
    /// Of weights that are gone.
    preemptions: u64,
    metrics: Arc<Metrics>,
}

impl Lanes {
    pub(super) fn new(worker: Worker, max_model_len: usize, metrics: Arc<Metrics>) -> Self {
        Self {
            newest: Some(worker),
            older: Vec::new(),
            held: Vec::new(),
            settling: Vec::new(),
            draining: None,
            leaving: Vec::new(),
            next_id: 0,
            max_model_len,
            preemptions: 0,
            metrics,
        }
    }

    /// Runs until it is told to stop or a rank fails; returns why.
    pub(super) fn run(mut self, inbox: &Receiver<Command>) -> String {
        let cause = loop {
            if let ControlFlow::Break(cause) = self.listen(inbox) {
                break cause;
            }
            self.workers().for_each(Worker::plan);
            self.drop_cancelled();
            self.record();
            if let Some(stopped) = self.workers().find_map(|worker| worker.step().err()) {
                break stopped.to_string();
            }
            self.retire();
        };
        self.workers().for_each(|worker| worker.fail(&cause));
        self.held.drain(..).for_each(|(_, client)| client.fail(&cause, &self.metrics));
        // A process must not go while threads of its ranks talk to a GPU.
        self.leaving.drain(..).for_each(|thread| drop(thread.join()));
        cause
    }

    /// Takes what has come; with nothing to do, waits for something.
    fn listen(&mut self, inbox: &Receiver<Command>) -> ControlFlow<String> {
        const ENDED: &str = "it was shut down";
        if self.workers().all(|worker| worker.is_idle()) {
            self.record();
            let waits_for_itself = !self.older.is_empty()
                || !self.leaving.is_empty()
                || !self.held.is_empty()
                || self.draining.is_some();
            let come = match waits_for_itself {
                true => inbox.recv_timeout(LOOK),
                false => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match come {
                Ok(command) => self.take(command)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return ControlFlow::Break(ENDED.to_owned()),
            }
        }
        loop {
            match inbox.try_recv() {
                Ok(command) => self.take(command)?,
                Err(TryRecvError::Disconnected) => return ControlFlow::Break(ENDED.to_owned()),
                Err(TryRecvError::Empty) => return ControlFlow::Continue(()),
            }
        }
    }

    fn take(&mut self, command: Command) -> ControlFlow<String> {
        match command {
            Command::Submit(submission) => self.admit(*submission),
            Command::Swap(worker, done) => {
                self.swap(*worker);
                // Whoever asked may be gone.
                let _ = done.send(());
            }
            Command::Settle(done) => self.settling.push(done),
            Command::Drain(done) => {
                self.draining = Some(done);
                if let Some(newest) = &mut self.newest {
                    self.held.extend(newest.take_waiting());
                }
            }
            Command::Fail(cause) => return ControlFlow::Break(cause),
            Command::Stop => return ControlFlow::Break("it was shut down".to_owned()),
        }
        ControlFlow::Continue(())
    }

    fn admit(&mut self, submission: Submission) {
        let id = SeqId(self.next_id);
        self.next_id += 1;
        let generation = submission.request.together.generation();
        if let Some(same) = self.workers().find(|worker| worker.generation() == generation) {
            return same.admit(id, submission);
        }
        match &mut self.newest {
            Some(newest) if self.draining.is_none() => newest.admit(id, submission),
            _ => self.held.push(prepare(id, submission, self.max_model_len)),
        }
    }

    fn swap(&mut self, mut worker: Worker) {
        if let Some(mut old) = self.newest.take() {
            self.held.extend(old.take_waiting());
            self.older.push(old);
        }
        self.held.drain(..).for_each(|(sequence, client)| worker.adopt(sequence, client));
        self.newest = Some(worker);
    }

    /// Lets weights go that nothing runs on any more.
    fn retire(&mut self) {
        self.leaving.retain(|thread| !thread.is_finished());
        let done: Vec<Worker> = self.older.extract_if(.., Worker::is_done).collect();
        for worker in done {
            self.leave(worker);
        }
        if self.draining.is_some() && self.newest.as_mut().is_some_and(Worker::is_done) {
            let newest = self.newest.take().expect("it is there");
            self.leave(newest);
        }
        if !self.older.is_empty() || !self.leaving.is_empty() {
            return;
        }
        for done in self.settling.drain(..) {
            // Whoever asked may be gone.
            let _ = done.send(());
        }
        if self.newest.is_none() {
            self.draining.take().map(|done| done.send(()));
        }
    }

    fn leave(&mut self, worker: Worker) {
        self.preemptions += worker.moment().preemptions;
        let leaving = std::thread::Builder::new().name("leaving".to_owned()).spawn(move || drop(worker));
        // Where there is no thread for it, it is gone already.
        self.leaving.extend(leaving);
    }

    fn drop_cancelled(&mut self) {
        let before = self.held.len();
        self.held.retain(|(_, client)| !client.is_gone());
        (self.held.len()..before).for_each(|_| self.metrics.aborted());
    }

    fn record(&mut self) {
        let mut sum = Moment { waiting: self.held.len(), preemptions: self.preemptions, ..Moment::default() };
        for worker in self.older.iter().chain(&self.newest) {
            sum.add(worker.moment());
        }
        let older = self.older.iter().map(|worker| worker.moment().running).sum();
        self.metrics.set(sum, older);
    }

    /// Older ones first.
    fn workers(&mut self) -> impl Iterator<Item = &mut Worker> {
        self.older.iter_mut().chain(&mut self.newest)
    }
}
