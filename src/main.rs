//! The command `tpde`. Everything it does is in [`cli`]; everything it knows of the format is in the library.

#![forbid(unsafe_code)]

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
