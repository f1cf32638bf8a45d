//! Threads that share the chunks of a slice: no lock and no allocation between one piece of work and the next.
//!
//! A thread that has nothing to do spins for a while, because the next piece of work of a step is microseconds away, and then
//! sleeps. Work is not waited for by those who sleep through it: whoever is awake does it.
#![expect(
    unsafe_code,
    reason = "threads that outlive a borrow are lent it, and parts of one slice and of one list of scratches"
)]

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Looks for work before a thread sleeps: some 100 microseconds.
const SPINS: usize = 4000;
/// Looks at those who still work before the processor is left to others, who may be them.
const PATIENCE: usize = 2000;

/// Threads, and a scratch of its own for each and for the caller.
#[derive(Debug)]
pub(super) struct Pool<S> {
    shared: Arc<Shared<S>>,
    threads: Vec<JoinHandle<()>>,
    /// One caller at a time, and no task that calls: with this, no reference to a pool can be sent to another thread.
    one_caller: PhantomData<Cell<()>>,
}

#[derive(Debug)]
struct Shared<S> {
    /// Number of the work in the upper half, whether it is [`OPEN`], and how many threads are at it.
    state: AtomicU64,
    /// Changed only by the caller, while nobody is at it and it is not open.
    work: UnsafeCell<Work>,
    /// The next chunk that nobody has taken.
    next: AtomicUsize,
    /// Which threads sleep or are about to.
    asleep: Vec<AtomicBool>,
    stop: AtomicBool,
    /// The first panic of a task. Taken only where there is one.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// The caller's, then the threads': each touches its own only.
    scratches: Vec<UnsafeCell<S>>,
}

/// Threads may still join the work.
const OPEN: u64 = 1 << 31;
const NUMBER: u64 = 1 << 32;

/// A task to be called with the number of each chunk and of the thread that it is on.
#[derive(Clone, Copy, Debug)]
struct Work {
    task: *const (dyn Fn(usize, usize) + Sync),
    chunks: usize,
}

// SAFETY: the work is written by the caller alone while the state is closed and nobody is at it, and read by threads that
// joined while it was open; the task is `Sync`. A scratch is touched by one thread only, which may therefore own it.
unsafe impl<S: Send> Sync for Shared<S> {}
// SAFETY: as above; the pointer is followed only while its work is open.
unsafe impl<S: Send> Send for Shared<S> {}

impl<S: Default + Send + 'static> Pool<S> {
    /// A pool of `threads` threads, the caller being one of them.
    ///
    /// # Errors
    /// The system's refusal.
    pub(super) fn new(threads: usize) -> std::io::Result<Self> {
        let nothing: *const (dyn Fn(usize, usize) + Sync) = &|_: usize, _: usize| {};
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            work: UnsafeCell::new(Work { task: nothing, chunks: 0 }),
            next: AtomicUsize::new(0),
            asleep: (1..threads).map(|_| AtomicBool::new(false)).collect(),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            scratches: (0..threads).map(|_| UnsafeCell::default()).collect(),
        });
        let mut pool = Self { shared, threads: Vec::new(), one_caller: PhantomData };
        for thread in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("cpu-{thread}"));
            pool.threads.push(builder.spawn(move || shared.work_until_stopped(thread))?);
        }
        Ok(pool)
    }

    /// How many threads there are, the caller being one of them.
    pub(super) fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `task(i, chunk, scratch)` for the chunks of `out`, all of `len` values but the last: on all threads, or on the
    /// caller's alone.
    ///
    /// # Panics
    /// When a task panics, after all others have ended.
    pub(super) fn chunks<T: Send>(
        &self,
        out: &mut [T],
        len: usize,
        on: Threads,
        task: impl Fn(usize, &mut [T], &mut S) + Sync,
    ) {
        if out.is_empty() {
            return;
        }
        let chunks = out.len().div_ceil(len);
        let slice = Slice { start: out.as_mut_ptr(), len: out.len() };
        let scratches = &self.shared;
        let task = |chunk: usize, thread: usize| {
            // SAFETY: every chunk number below `chunks` is handed out once, so chunks do not overlap, and `out` is borrowed
            // until all of them are done.
            let out = unsafe { slice.chunk(chunk, len) };
            // SAFETY: of the scratches, this thread has its own only, and calls one task at a time.
            let scratch = unsafe { &mut *scratches.scratches[thread].get() };
            task(chunk, out, scratch);
        };
        if self.threads.is_empty() || chunks == 1 || on == Threads::Caller {
            (0..chunks).for_each(|chunk| task(chunk, 0));
        } else {
            self.shared.run(&task, chunks, &self.threads);
        }
    }
}

/// Who does a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Threads {
    /// The caller alone.
    Caller,
    /// Whoever is awake.
    All,
}

impl<S> Shared<S> {
    fn run(&self, task: &(dyn Fn(usize, usize) + Sync), chunks: usize, threads: &[JoinHandle<()>]) {
        // SAFETY: only the lifetime changes. The pointer is followed between here and the wait below, after which nobody is at
        // the work and nobody can join it.
        let task: *const (dyn Fn(usize, usize) + Sync + 'static) = unsafe { std::mem::transmute(task) };
        // SAFETY: the state is closed and nobody is at it, so no thread reads the work; there is only one caller.
        unsafe { *self.work.get() = Work { task, chunks } };
        self.next.store(0, Ordering::Relaxed);
        let number = self.state.load(Ordering::Relaxed) / NUMBER + 1;
        self.state.store((number * NUMBER) | OPEN, Ordering::SeqCst);
        for (thread, asleep) in threads.iter().zip(&self.asleep) {
            // Whoever is not seen asleep here sees the new state before it sleeps.
            if asleep.load(Ordering::SeqCst) {
                thread.thread().unpark();
            }
        }
        self.take_chunks(0);
        self.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut looks = 0;
        while !self.state.load(Ordering::Acquire).is_multiple_of(OPEN) {
            looks += 1;
            if looks < PATIENCE { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        if let Some(panic) = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take() {
            resume_unwind(panic);
        }
    }

    /// For those at the work only.
    fn take_chunks(&self, thread: usize) {
        // SAFETY: whoever is at the work has seen it open, and it does not change until all have left.
        let work = unsafe { *self.work.get() };
        // SAFETY: likewise, the caller keeps what the task borrows until all have left.
        let task = unsafe { &*work.task };
        let done = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let chunk = self.next.fetch_add(1, Ordering::Relaxed);
                if chunk >= work.chunks {
                    return;
                }
                task(chunk, thread);
            }
        }));
        if let Err(panic) = done {
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
    }

    fn work_until_stopped(&self, thread: usize) {
        let mut last = 0;
        loop {
            let state = self.wait_for_work(thread, last);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            last = state / NUMBER;
            if self.join(last) {
                self.take_chunks(thread);
                self.state.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// The state once it is another work's than `last`.
    fn wait_for_work(&self, thread: usize, last: u64) -> u64 {
        for _ in 0..SPINS {
            let state = self.state.load(Ordering::Acquire);
            if state / NUMBER != last {
                return state;
            }
            std::hint::spin_loop();
        }
        let asleep = &self.asleep[thread - 1];
        loop {
            asleep.store(true, Ordering::SeqCst);
            let state = self.state.load(Ordering::SeqCst);
            if state / NUMBER != last {
                asleep.store(false, Ordering::Relaxed);
                return state;
            }
            std::thread::park();
        }
    }

    /// Whether this thread is now at work `number`; not when that was closed in the meantime.
    fn join(&self, number: u64) -> bool {
        let joined = |state: u64| (state / NUMBER == number && state & OPEN != 0).then_some(state + 1);
        self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, joined).is_ok()
    }
}

impl<S> Drop for Pool<S> {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.state.fetch_add(NUMBER, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // Panics of tasks were passed on when they happened.
            let _ = thread.join();
        }
    }
}

/// A slice that several threads have parts of.
struct Slice<T> {
    start: *mut T,
    len: usize,
}

// SAFETY: whoever takes a part promises that it is nobody else's; then parts are sent, which `T: Send` allows.
unsafe impl<T: Send> Sync for Slice<T> {}

impl<T> Slice<T> {
    /// Chunk `chunk` of `len` values, or what is left of it.
    ///
    /// # Safety
    /// The slice is borrowed for as long as the result is, and nobody else has this chunk.
    #[expect(clippy::mut_from_ref, reason = "that it is nobody else's is the caller's promise")]
    unsafe fn chunk(&self, chunk: usize, len: usize) -> &mut [T] {
        let first = chunk * len;
        assert!(first < self.len, "a chunk of the slice");
        // SAFETY: within the slice, and exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), len.min(self.len - first)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn every_chunk_is_done_once_however_long_threads_slept() {
        for threads in [1, 2, 5] {
            let pool = Pool::<usize>::new(threads).unwrap();
            for round in 0..2000 {
                let mut out = vec![0; round % 37];
                pool.chunks(&mut out, 3, Threads::All, |chunk, out, scratch| {
                    *scratch += 1;
                    out.iter_mut().enumerate().for_each(|(i, out)| *out += 1 + chunk * 3 + i);
                });
                assert!(out.iter().copied().eq(1..=out.len()), "{threads} threads: {out:?}");
                if round % 500 == 0 {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            let mut done = 0;
            pool.chunks(&mut [()], 1, Threads::Caller, |_, _, scratch| assert!(*scratch > 0));
            let scratches = &pool.shared.scratches;
            // SAFETY: no work is open, so no thread touches its scratch.
            scratches.iter().for_each(|scratch| done += unsafe { *scratch.get() });
            assert_eq!(done, (0..2000).map(|round: usize| (round % 37).div_ceil(3)).sum::<usize>());
        }
    }

    #[test]
    fn a_panic_of_a_task_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::<()>::new(3).unwrap();
        for _ in 0..20 {
            let mut out = [0; 64];
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.chunks(&mut out, 1, Threads::All, |chunk, _, ()| assert!(chunk != 7, "chunk seven"));
            }));
            assert_eq!(*caught.unwrap_err().downcast::<&str>().unwrap(), "chunk seven");
            pool.chunks(&mut out, 1, Threads::All, |chunk, out, ()| out[0] = chunk);
            assert!(out.iter().copied().eq(0..64));
        }
    }
}
