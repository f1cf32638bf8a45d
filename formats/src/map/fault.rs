//! The last word of a program when a mapped page cannot be had: which file it was of.

use crate::error::Shown;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// More mappings than this at a time have no name in the last line.
const MOST: usize = 4096;

/// What is mapped now, for a handler that may neither lock nor allocate.
static MAPPINGS: [Slot; MOST] = [const { Slot::empty() }; MOST];

struct Slot {
    taken: AtomicBool,
    /// 0 while there is nothing to find.
    start: AtomicUsize,
    len: AtomicUsize,
    name: AtomicPtr<u8>,
    name_len: AtomicUsize,
}

impl Slot {
    const fn empty() -> Self {
        Self {
            taken: AtomicBool::new(false),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            name: AtomicPtr::new(std::ptr::null_mut()),
            name_len: AtomicUsize::new(0),
        }
    }
}

/// A mapping whose file the last line can name, for as long as this lives: the mapping must live longer.
#[derive(Debug)]
pub(super) struct Named(Option<usize>);

impl Named {
    pub(super) fn new(bytes: &[u8], path: &Path) -> Self {
        let free = |slot: &Slot| {
            slot.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let Some(at) = MAPPINGS.iter().position(free) else { return Self(None) };
        let name = Shown(&path.to_string_lossy()).to_string().into_bytes().into_boxed_slice();
        let slot = &MAPPINGS[at];
        slot.name_len.store(name.len(), Ordering::Relaxed);
        slot.name.store(Box::into_raw(name).cast(), Ordering::Relaxed);
        slot.len.store(bytes.len(), Ordering::Relaxed);
        slot.start.store(bytes.as_ptr().addr(), Ordering::Release);
        Self(Some(at))
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let Some(at) = self.0 else { return };
        let slot = &MAPPINGS[at];
        slot.start.store(0, Ordering::Release);
        let name = slot.name.swap(std::ptr::null_mut(), Ordering::Relaxed);
        let name = std::ptr::slice_from_raw_parts_mut(name, slot.name_len.load(Ordering::Relaxed));
        // SAFETY: made by `Box::into_raw` in `new` with this length, and taken out once. The handler reads the name of a mapping only
        // while some thread waits for a page of it, which therefore still is mapped: its name goes first, when nobody reads it any more.
        drop(unsafe { Box::from_raw(name) });
        slot.taken.store(false, Ordering::Release);
    }
}

/// The program's name and its advice.
static WORDS: OnceLock<(&'static str, &'static str)> = OnceLock::new();

/// Makes the program say on stderr which file it was and end with exit code 2 when a mapped page cannot be had (SIGBUS): its file
/// became shorter, or its disk fails. Without this the system ends it without a word. Nothing else runs: no destructor, no flush.
///
/// The line is `PROGRAM: error: FILE: it became shorter while it was read, or its disk failed; ADVICE`. The first call's words are
/// those that are written.
///
/// # Errors
/// The system's, when it takes no handler.
pub fn end_on_fault(program: &'static str, advice: &'static str) -> std::io::Result<()> {
    WORDS.get_or_init(|| (program, advice));
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = fault;
    // SAFETY: a sigaction is plain numbers and pointers, of which all zeroes are none.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler has the signature that an action with SA_SIGINFO calls, lives as long as the program and calls what a
    // handler may; both pointers are to a live action, or null, which asks for no former one.
    match unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// All threads of a program may come here at once.
extern "C" fn fault(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    static FIRST: AtomicBool = AtomicBool::new(true);
    if !FIRST.swap(false, Ordering::Relaxed) {
        loop {
            // SAFETY: waits for a signal and touches nothing; a handler may call it. The first thread is about to end the program.
            unsafe { libc::pause() };
        }
    }
    // SAFETY: the system gives a handler with SA_SIGINFO its information, of which SIGBUS has an address.
    let address = unsafe { (*info).si_addr() }.addr();
    let (program, advice) = WORDS.get().copied().unwrap_or_default();
    // In one piece, so that what others write does not come between; on the stack, since a handler may not allocate.
    let mut line = [0; 4096];
    let parts: [&[u8]; 6] = [
        program.as_bytes(),
        b": error: ",
        name_at(address).unwrap_or(b"a mapped file"),
        b": it became shorter while it was read, or its disk failed; ",
        advice.as_bytes(),
        b"\n",
    ];
    let mut len = 0;
    for part in parts {
        let part = &part[..part.len().min(line.len() - len)];
        line[len..len + part.len()].copy_from_slice(part);
        len += part.len();
    }
    // SAFETY: the pointer and the length are of the line, and a handler may call it (POSIX, 2.4.3). A stderr that takes nothing is no
    // reason to go on.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), len) };
    // SAFETY: a handler may call it (POSIX, 2.4.3), and it takes any number.
    unsafe { libc::_exit(2) };
}

/// The name of the file that is mapped at `address`.
fn name_at(address: usize) -> Option<&'static [u8]> {
    let slot = MAPPINGS.iter().find(|slot| {
        let start = slot.start.load(Ordering::Acquire);
        start != 0 && address >= start && address - start < slot.len.load(Ordering::Relaxed)
    })?;
    let name = slot.name.load(Ordering::Relaxed);
    // SAFETY: a name is there as long as its mapping, and this mapping's pages are being waited for by the thread that is here, so
    // nobody drops it; see `Named`.
    Some(unsafe { std::slice::from_raw_parts(name, slot.name_len.load(Ordering::Relaxed)) })
}
