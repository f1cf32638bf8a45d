//! Jobs in order on a bounded number of threads, with progress and interruption: how files are converted and verified.

use crate::Error;
use crate::error::human_bytes;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Each worker owns some MiB of buffers, so this many keep the program below 1 GiB.
pub(crate) const MAX_THREADS: usize = 48;

/// Threads beside one for each CPU: some always wait for a disk.
const WAITING: usize = 4;

/// How work is to be done.
#[derive(Clone, Debug)]
pub struct Control {
    threads: usize,
    interrupt: Arc<AtomicBool>,
    progress: Progress,
}

/// What a user sees of work in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Nothing.
    Quiet,
    /// A bar where stderr is a terminal, otherwise a line every half minute and one when a stage is done.
    Shown,
}

impl Control {
    /// `threads` of `None` means one for each CPU and four more, which wait for disks; all counts are held between 1 and 48. Work stops with
    /// [`Error::Interrupted`] when `interrupt` becomes true.
    pub fn new(threads: Option<usize>, interrupt: Arc<AtomicBool>, progress: Progress) -> Self {
        let suitable = || thread::available_parallelism().map_or(1, usize::from) + WAITING;
        Self { threads: threads.unwrap_or_else(suitable).clamp(1, MAX_THREADS), interrupt, progress }
    }

    pub(crate) fn stage(&self, name: &'static str, bytes: u64) -> Stage {
        Stage::new(name, bytes, self.progress)
    }

    /// Does all jobs, started in their order; the results are in their order too.
    ///
    /// `work` gets a worker's own memory and returns the result; the first error stops all workers.
    pub(crate) fn run<J: Sync, R: Send, M: Default>(
        &self,
        jobs: &[J],
        work: impl Fn(&mut M, &J) -> Result<R, Error> + Sync,
    ) -> Result<Vec<R>, Error> {
        let next = AtomicUsize::new(0);
        let failed = AtomicBool::new(false);
        let failure: Mutex<Option<Error>> = Mutex::new(None);
        let fail = |error| {
            failed.store(true, Ordering::Relaxed);
            failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        };
        let worker = || {
            let mut memory = M::default();
            let mut results = Vec::new();
            while !failed.load(Ordering::Relaxed) {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(job) = jobs.get(index) else { break };
                if self.interrupt.load(Ordering::Relaxed) {
                    fail(Error::Interrupted);
                    break;
                }
                match work(&mut memory, job) {
                    Ok(result) => results.push((index, result)),
                    Err(error) => fail(error),
                }
            }
            results
        };
        let mut results: Vec<(usize, R)> = thread::scope(|scope| {
            let workers: Vec<_> = (0..self.threads.min(jobs.len())).map(|_| scope.spawn(worker)).collect();
            workers
                .into_iter()
                .flat_map(|w| w.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        });
        if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        results.sort_unstable_by_key(|(index, _)| *index);
        Ok(results.into_iter().map(|(_, result)| result).collect())
    }

    /// # Errors
    /// [`Error::Interrupted`] after Ctrl-C.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.interrupt.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }
}

/// Progress over a number of bytes.
#[derive(Debug)]
pub(crate) struct Stage {
    name: &'static str,
    total: u64,
    done: AtomicU64,
    start: Instant,
    shown: Shown,
}

#[derive(Debug)]
enum Shown {
    Nothing,
    Bar(ProgressBar),
    /// A line now and then; when the last one was.
    Lines(Mutex<Instant>),
}

/// How often a line is written where there is no terminal for a bar.
const LINE_EVERY: Duration = Duration::from_secs(30);

impl Stage {
    fn new(name: &'static str, total: u64, progress: Progress) -> Self {
        let start = Instant::now();
        let shown = match progress {
            Progress::Quiet => Shown::Nothing,
            Progress::Shown if std::io::stderr().is_terminal() => Shown::Bar(bar(name, total)),
            Progress::Shown => Shown::Lines(Mutex::new(start)),
        };
        Self { name, total, done: AtomicU64::new(0), start, shown }
    }

    pub(crate) fn advance(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        match &self.shown {
            Shown::Nothing => {}
            Shown::Bar(bar) => bar.inc(bytes),
            Shown::Lines(last) => {
                let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
                if last.elapsed() >= LINE_EVERY {
                    *last = Instant::now();
                    eprintln!("{}", self.line(done));
                }
            }
        }
    }

    fn line(&self, done: u64) -> String {
        let per_second = done as f64 / self.start.elapsed().as_secs_f64().max(1e-3);
        let left = self.total.saturating_sub(done) as f64 / per_second.max(1.0);
        format!(
            "{}: {} of {}, {:.2} GB/s, {left:.0} s left",
            self.name,
            human_bytes(done),
            human_bytes(self.total),
            per_second / 1e9
        )
    }
}

impl Stage {
    /// What is said of a stage that is done; `None` for one that was broken off.
    fn last_line(&self) -> Option<String> {
        let seconds = self.start.elapsed().as_secs_f64();
        (self.done.load(Ordering::Relaxed) >= self.total).then(|| {
            let per_second = self.total as f64 / seconds.max(1e-3);
            format!(
                "{}: {} in {seconds:.1} s, {:.2} GB/s",
                self.name,
                human_bytes(self.total),
                per_second / 1e9
            )
        })
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        match &self.shown {
            Shown::Nothing => {}
            Shown::Bar(bar) => bar.finish_and_clear(),
            // An error is the only line of work that ends with one.
            Shown::Lines(_) => {
                if let Some(line) = self.last_line() {
                    eprintln!("{line}");
                }
            }
        }
    }
}

fn bar(name: &'static str, total: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    let template =
        "{prefix}: {bar:30} {decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}, {eta} left";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_prefix(name);
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control(threads: usize) -> Control {
        Control::new(Some(threads), Arc::default(), Progress::Quiet)
    }

    #[test]
    fn results_come_in_the_order_of_the_jobs() {
        let jobs: Vec<u64> = (0..1000).collect();
        let squares = control(7).run(&jobs, |(): &mut (), &n| Ok(n * n)).unwrap();
        assert!(squares.iter().zip(&jobs).all(|(s, n)| *s == n * n));
    }

    #[test]
    fn the_first_error_stops_the_work() {
        let jobs: Vec<u64> = (0..100_000).collect();
        let done = AtomicUsize::new(0);
        let error = control(3)
            .run(&jobs, |(): &mut (), &n| {
                done.fetch_add(1, Ordering::Relaxed);
                if n == 5 { Err(Error::OutputName { path: "five".into() }) } else { Ok(()) }
            })
            .unwrap_err();
        assert!(error.to_string().contains("five"), "{error}");
        assert!(done.load(Ordering::Relaxed) < jobs.len());
    }

    #[test]
    fn a_line_says_how_far_and_how_fast() {
        let stage = Stage::new("converting", 4_000_000_000, Progress::Quiet);
        let line = stage.line(1_000_000_000);
        assert!(line.starts_with("converting: 1.00 GB of 4.00 GB, "), "{line}");
        stage.advance(1_000_000_000);
        assert_eq!(stage.last_line(), None);
        stage.advance(3_000_000_000);
        let line = stage.last_line().unwrap();
        assert!(line.starts_with("converting: 4.00 GB in 0.0 s, "), "{line}");
    }

    #[test]
    fn an_interruption_stops_the_work() {
        let interrupt = Arc::new(AtomicBool::new(true));
        let control = Control::new(Some(2), interrupt, Progress::Quiet);
        let error = control.run(&[1, 2, 3], |(): &mut (), _| Ok(())).unwrap_err();
        assert_eq!(error.exit_code(), 130);
    }
}
