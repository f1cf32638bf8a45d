//! Rank files read again while they are served, against their digests: disks lose bits without a word.

use super::reloader::Reloader;
use crate::rank::RankPart;
use crate::status::{Scrubbed, unix};
use formats::digest::chunk_digest;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// The thread that reads. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Scrubber {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Scrubber {
    /// Reads all rank files, `interval` after the last time, for as long as it lives.
    ///
    /// # Errors
    /// The system's, when it gives no thread.
    pub(super) fn start(reloader: Arc<Reloader>, interval: Duration) -> std::io::Result<Self> {
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new().name("scrub".to_owned()).spawn(move || {
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                if round(&reloader, &stopped).is_none() {
                    return;
                }
            }
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Scrubber {
    fn drop(&mut self) {
        self.stop = None;
        // A panic was reported when it happened.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// All files once; `None` when it is to end.
fn round(reloader: &Reloader, stopped: &Receiver<()>) -> Option<()> {
    let parts = reloader.served().parts.clone();
    for (rank, part) in parts.into_iter().enumerate() {
        let fault = scrub(&part, stopped)?;
        match &fault {
            Some(fault) => tracing::error!(rank, "scrub: {fault}"),
            None => tracing::debug!(rank, "scrub: {} is as it was", part.shard.path().display()),
        }
        reloader.note_scrubbed(rank, &part, Scrubbed { at: unix(SystemTime::now()), fault });
    }
    Some(())
}

/// What is wrong with a file that is open, if anything; `None` when it is to end. What took its name is another file and not
/// looked at. Bytes are read, not taken from the mapping, so that a disk's fault is an error and no signal.
fn scrub(part: &RankPart, stopped: &Receiver<()>) -> Option<Option<String>> {
    let manifest = part.shard.manifest();
    let mut bytes = Vec::new();
    for (chunk, expected) in manifest.chunks.iter().enumerate() {
        let begin = Instant::now();
        let range = manifest.chunk(chunk);
        bytes.resize(usize::try_from(range.end - range.start).expect("a chunk fits memory"), 0);
        if let Err(error) = part.watch.file().read_exact_at(&mut bytes, range.start) {
            let path = part.shard.path().display();
            let why = match error.kind() {
                std::io::ErrorKind::UnexpectedEof => "it became shorter".to_owned(),
                _ => format!("cannot read: {error}"),
            };
            return Some(Some(format!(
                "{path}: rank {}, chunk {chunk} (bytes {}..{}): {why}; copy or convert the file again",
                manifest.rank, range.start, range.end
            )));
        }
        if chunk_digest(&bytes, range.start, manifest.bytes) != *expected {
            return Some(Some(part.shard.damaged(chunk, &bytes).to_string()));
        }
        // Half of one processor at most.
        if stopped.recv_timeout(begin.elapsed()) != Err(RecvTimeoutError::Timeout) {
            return None;
        }
    }
    Some(None)
}
