//! `shardrun`: see `shardrun --help`.

mod cli;

use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
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
