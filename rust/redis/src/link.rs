//! `Link`: a plain connection whose answers to gets go from the socket into their rows.
//!
//! The crate's own connection reads 8 KiB at a time and copies a value twice. Commands are packed by the crate, and
//! its parser reads all answers but values. A call reads all of its answers by one of the two ways: neither reads ahead
//! of what was asked for.

use crate::options::{Address, Options};
use redis::{Parser, RedisResult, Value, cmd, parse_redis_value};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Bytes that are read at once where a value is smaller.
const AHEAD: usize = 16 << 10;
/// Most bytes of the line that begins an answer.
const LINE: u64 = 64 << 10;

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

pub(crate) struct Link {
    reader: BufReader<Stream>,
    parser: Parser,
}

impl Link {
    /// Connects, says who we are and chooses the database.
    pub(crate) fn open(options: &Options) -> RedisResult<Self> {
        let stream = match &options.address {
            Address::Unix(path) => Stream::Unix(UnixStream::connect(path)?),
            Address::Tcp { host, port, .. } => Stream::Tcp(connect(host, *port, options.connect_timeout)?),
        };
        stream.limit(options.connect_timeout)?;
        let mut link = Self { reader: BufReader::with_capacity(AHEAD, stream), parser: Parser::new() };
        if let Some(password) = &options.password {
            let mut auth = cmd("AUTH");
            if let Some(name) = &options.username {
                auth.arg(name);
            }
            link.ask(auth.arg(password))?;
        }
        if options.db != 0 {
            link.ask(cmd("SELECT").arg(options.db))?;
        }
        link.reader.get_ref().limit(options.timeout)?;
        Ok(link)
    }

    fn ask(&mut self, command: &redis::Cmd) -> RedisResult<()> {
        self.send(&command.get_packed_command())?;
        self.receive()?.extract_error().map(drop)
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) -> RedisResult<()> {
        Ok(self.reader.get_mut().write_all(bytes)?)
    }

    /// Reads an answer that is no value.
    pub(crate) fn receive(&mut self) -> RedisResult<Value> {
        self.parser.parse_value(&mut self.reader)
    }

    /// Reads a value into a row, as `Client::get` says; whether there was one.
    pub(crate) fn receive_into(&mut self, row: &mut [u8], varies: bool) -> RedisResult<bool> {
        let mut line = Vec::new();
        (&mut self.reader).take(LINE).read_until(b'\n', &mut line)?;
        let Some(start) = line.strip_suffix(b"\r\n") else { return Err(cut_or_wrong(&line).into()) };
        let Some(size) = start.strip_prefix(b"$") else {
            parse_redis_value(&line)?.extract_error()?;
            return Err(cut_or_wrong(&line).into());
        };
        if size == b"-1" {
            return Ok(false);
        }
        let size = std::str::from_utf8(size).ok().and_then(|size| size.parse::<u64>().ok());
        let size = size.ok_or_else(|| cut_or_wrong(&line))?;
        match usize::try_from(size).ok().and_then(|size| row.split_at_mut_checked(size)) {
            Some((start, rest)) if rest.is_empty() || varies => {
                self.reader.read_exact(start)?;
                rest.fill(0);
            }
            _ => {
                if io::copy(&mut (&mut self.reader).take(size), &mut io::sink())? < size {
                    return Err(io::Error::from(ErrorKind::UnexpectedEof).into());
                }
            }
        }
        let mut end = [0; 2];
        self.reader.read_exact(&mut end)?;
        if end == *b"\r\n" { Ok(true) } else { Err(cut_or_wrong(b"\r\n").into()) }
    }
}

impl Stream {
    /// Limits how long the server may be silent.
    fn limit(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => {
                stream.set_read_timeout(Some(timeout))?;
                stream.set_write_timeout(Some(timeout))
            }
            Self::Unix(stream) => {
                stream.set_read_timeout(Some(timeout))?;
                stream.set_write_timeout(Some(timeout))
            }
        }
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(bytes),
            Self::Unix(stream) => stream.read(bytes),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes),
            Self::Unix(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn connect(host: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
    let mut error = io::Error::new(ErrorKind::NotFound, "the name of the host has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(stream) => {
                // Without it the end of a value would wait for the server to acknowledge its beginning.
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(found) => error = found,
        }
    }
    Err(error)
}

/// The error for an answer that ends too early, or is none.
fn cut_or_wrong(line: &[u8]) -> io::Error {
    if line.ends_with(b"\n") {
        io::Error::new(ErrorKind::InvalidData, "the server's answer is not of the protocol")
    } else {
        ErrorKind::UnexpectedEof.into()
    }
}
