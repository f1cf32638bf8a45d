//! `shardrun`: see `shardrun --help`.

mod cli;

use std::io::Write;
use std::process::ExitCode;

/// What to do about a mapped file that is not there any more.
const ADVICE: &str = "it changed while it was in use: copy or convert the checkpoint again, and write new weights beside those that are served, never into them";

fn main() -> ExitCode {
    runtime::heap::share();
    if let Err(error) = formats::map::end_on_fault("shardrun", ADVICE) {
        let _ =
            writeln!(std::io::stderr(), "shardrun: error: cannot watch for faults of mapped files: {error}");
        return ExitCode::from(2);
    }
    match cli::run() {
        Ok(code) => code,
        Err(error) => {
            let message = error.to_string();
            let line = message.split('\n').map(str::trim).collect::<Vec<_>>().join(" ");
            // Where even stderr is closed the exit code must do.
            let _ = writeln!(std::io::stderr(), "shardrun: error: {line}");
            ExitCode::from(error.exit_code())
        }
    }
}
