//! The client with a minimal server: split commands, late answers, closed connections, sizes of values.
#![expect(clippy::unwrap_used, reason = "a test")]

use blockyard_redis::{Address, Answer, Client, Error, Options, Split};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

type Words = Vec<Vec<u8>>;
type Log = Arc<Mutex<Vec<Words>>>;

/// A server that answers each command of each connection with the result of `respond`, and records the commands.
fn server(respond: impl Fn(usize, &Words) -> Option<Vec<u8>> + Send + Sync + 'static) -> (Client, Log) {
    server_with(Duration::from_secs(20), respond)
}

fn server_with(
    timeout: Duration,
    respond: impl Fn(usize, &Words) -> Option<Vec<u8>> + Send + Sync + 'static,
) -> (Client, Log) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (log, respond) = (Log::default(), Arc::new(respond));
    let kept = log.clone();
    thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let (log, respond, stream) = (kept.clone(), respond.clone(), stream.unwrap());
            thread::spawn(move || serve(number, &stream, &log, &*respond));
        }
    });
    (Client::new(options(port, timeout)).unwrap(), log)
}

fn serve(number: usize, stream: &TcpStream, log: &Log, respond: &dyn Fn(usize, &Words) -> Option<Vec<u8>>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    while let Some(words) = read_command(&mut reader) {
        log.lock().unwrap().push(words.clone());
        match respond(number, &words) {
            // A client that has given up does not read it.
            Some(bytes) => drop((&*stream).write_all(&bytes)),
            None => return,
        }
    }
}

fn read_command(reader: &mut impl BufRead) -> Option<Words> {
    let count = read_number(reader, b'*')?;
    (0..count)
        .map(|_| {
            let mut word = vec![0; read_number(reader, b'$')? + 2];
            reader.read_exact(&mut word).ok()?;
            assert_eq!(word.split_off(word.len() - 2), b"\r\n");
            Some(word)
        })
        .collect()
}

fn read_number(reader: &mut impl BufRead, kind: u8) -> Option<usize> {
    let mut line = Vec::new();
    reader.read_until(b'\n', &mut line).ok().filter(|&read| read > 0)?;
    assert_eq!((line[0], &line[line.len() - 2..]), (kind, &b"\r\n"[..]));
    std::str::from_utf8(&line[1..line.len() - 2]).unwrap().parse().ok()
}

fn options(port: u16, timeout: Duration) -> Options {
    Options {
        address: Address::Tcp { host: "127.0.0.1".to_owned(), port, tls: None },
        is_cluster: false,
        username: None,
        password: None,
        db: 0,
        connect_timeout: Duration::from_secs(20),
        timeout,
    }
}

fn names(count: u8) -> Vec<Vec<u8>> {
    (0..count).map(|number| vec![b'k', number]).collect()
}

fn bulk(bytes: &[u8]) -> Vec<u8> {
    [format!("${}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

#[test]
fn small_and_large_values_arrive_whole_and_in_order() {
    let (client, log) =
        server(|_, words| Some(if words[1][1] == 2 { b"-OOM full\r\n".to_vec() } else { b"+OK\r\n".to_vec() }));
    let values = [vec![1; 10], vec![2; 40_000], vec![3; 16 << 10], vec![4; 1]];
    let slices: Vec<&[u8]> = values.iter().map(Vec::as_slice).collect();
    assert_eq!(client.put(&[], &names(4), &slices, Some(1500)).unwrap().1, [true, true, false, true]);
    let expected = names(4)
        .into_iter()
        .zip(values)
        .map(|(name, value)| vec![b"SET".to_vec(), name, value, b"PX".to_vec(), b"1500".to_vec()]);
    assert_eq!(*log.lock().unwrap(), expected.collect::<Vec<_>>());
}

/// A row that takes a whole value.
fn whole(row: &mut [u8]) -> Split<'_> {
    (&mut [], row)
}

#[test]
fn the_first_bytes_of_a_value_go_to_its_head() {
    let values = [&[1, 2, 3, 4, 5, 6][..], &[1, 2, 3, 4, 5], &[1]];
    let (client, _) = server(move |_, words| Some(bulk(values[usize::from(words[1][1])])));
    for (varies, second) in [(false, [0; 4]), (true, [3, 4, 5, 0])] {
        let (mut heads, mut rows) = ([[0; 2]; 3], [[0; 4]; 3]);
        let mut lent: Vec<Split<'_>> =
            heads.iter_mut().zip(&mut rows).map(|(head, row)| (&mut head[..], &mut row[..])).collect();
        assert_eq!(client.get(&[], &names(3), &mut lent, varies).unwrap().1, [true; 3]);
        assert_eq!(rows, [[3, 4, 5, 6], second, [0; 4]]);
        assert_eq!(heads, [[1, 2], if varies { [1, 2] } else { [0; 2] }, [0; 2]]);
    }
}

#[test]
fn commands_run_before_the_values_in_one_round_trip() {
    let (client, log) = server(|_, words| match &words[0][..] {
        b"ZCARD" => Some(b":7\r\n".to_vec()),
        b"GET" => Some(bulk(&[9; 4])),
        _ => Some(b"-ERR unknown\r\n".to_vec()),
    });
    let first = [vec![b"ZCARD".to_vec(), b"order".to_vec()], vec![b"BAD".to_vec()]];
    let mut row = [0; 4];
    let (answers, found, _) = client.get(&first, &names(1), &mut [whole(&mut row)], false).unwrap();
    assert!(matches!(&answers[..], [Answer::Int(7), Answer::Refused(_)]), "{answers:?}");
    assert_eq!((found, row), (vec![true], [9; 4]));
    assert_eq!(verbs(&log), [&b"ZCARD"[..], b"BAD", b"GET"]);
}

fn verbs(log: &Mutex<Vec<Words>>) -> Vec<Vec<u8>> {
    log.lock().unwrap().iter().map(|words| words[0].clone()).collect()
}

/// A server that refuses any transaction with the value `refused`.
fn queueing(refused: &'static [u8]) -> (Client, Arc<Mutex<Vec<Words>>>) {
    let (queued, is_bad) = (Mutex::new(0), Mutex::new(false));
    server(move |_, words| {
        let (mut queued, mut is_bad) = (queued.lock().unwrap(), is_bad.lock().unwrap());
        Some(match &words[0][..] {
            b"MULTI" => {
                (*queued, *is_bad) = (0, false);
                b"+OK\r\n".to_vec()
            }
            b"EXEC" if *is_bad => b"-EXECABORT discarded\r\n".to_vec(),
            b"EXEC" => [format!("*{queued}\r\n"), "+OK\r\n".repeat(*queued - 1), ":5\r\n".to_owned()].concat().into(),
            b"SET" if words[2] == refused => {
                *is_bad = true;
                b"-OOM full\r\n".to_vec()
            }
            _ => {
                *queued += 1;
                b"+QUEUED\r\n".to_vec()
            }
        })
    })
}

#[test]
fn the_values_of_a_group_and_its_command_are_one_transaction() {
    let (client, log) = queueing(b"none");
    let groups = [(2, vec![b"ONE".to_vec(), b"k".to_vec()]), (1, vec![b"TWO".to_vec(), b"k".to_vec()])];
    let (answers, stored, _) = client.put(&groups, &names(3), &[&[1], &[2], &[3]], None).unwrap();
    assert_eq!((answers, stored), (vec![Answer::Int(5); 2], vec![true; 3]));
    let expected = [&b"MULTI"[..], b"SET", b"SET", b"ONE", b"EXEC", b"MULTI", b"SET", b"TWO", b"EXEC"];
    assert_eq!(verbs(&log), expected);
}

#[test]
fn a_group_of_which_a_value_is_refused_stores_nothing_and_says_why() {
    let (client, _) = queueing(&[2]);
    let groups = [(2, vec![b"ONE".to_vec(), b"k".to_vec()]), (1, vec![b"TWO".to_vec(), b"k".to_vec()])];
    let (answers, stored, _) = client.put(&groups, &names(3), &[&[1], &[2], &[3]], None).unwrap();
    assert_eq!(stored, [false, false, true]);
    assert!(matches!(&answers[..], [Answer::Refused(why), Answer::Int(5)] if why.contains("OOM")), "{answers:?}");
}

#[test]
fn a_value_of_another_length_leaves_its_row() {
    let sizes = |words: &Words| [8, 9, 7, 0][usize::from(words[1][1])];
    let (client, _) = server(move |_, words| Some(bulk(&vec![5; sizes(words)])));
    let mut rows = [[1_u8; 8]; 4];
    let mut get = |varies| {
        let mut lent: Vec<_> = rows.iter_mut().map(|row| whole(row)).collect();
        assert_eq!(client.get(&[], &names(4), &mut lent, varies).unwrap().1, [true; 4]);
        rows
    };
    assert_eq!(get(false), [[5; 8], [1; 8], [1; 8], [1; 8]]);
    assert_eq!(get(true), [[5; 8], [1; 8], [5, 5, 5, 5, 5, 5, 5, 0], [0; 8]]);
}

#[test]
fn an_absent_value_leaves_its_row() {
    let (client, _) = server(|_, _| Some(b"$-1\r\n".to_vec()));
    let mut row = [1_u8; 8];
    assert_eq!(client.get(&[], &names(1), &mut [whole(&mut row)], true).unwrap().1, [false]);
    assert_eq!(row, [1; 8]);
}

#[test]
fn a_late_answer_is_not_taken_for_the_next_calls() {
    let (release, wait) = std::sync::mpsc::channel::<()>();
    let wait = Mutex::new(wait);
    let (client, _) = server_with(Duration::from_millis(500), move |number, _| {
        if number == 0 {
            let _ = wait.lock().unwrap().recv();
            return Some(bulk(b"late"));
        }
        Some(bulk(b"next"))
    });
    let mut row = [0_u8; 4];
    let error = client.get(&[], &names(1), &mut [whole(&mut row)], false).unwrap_err();
    assert!(error.to_string().contains("does not answer in time"), "{error}");
    release.send(()).unwrap();
    assert_eq!(client.get(&[], &names(1), &mut [whole(&mut row)], false).unwrap().1, [true]);
    assert_eq!(&row, b"next");
}

#[test]
fn a_connection_that_the_server_closed_is_replaced() {
    // Each connection answers once and is closed at the second command.
    let answered = Mutex::new(Vec::new());
    let (client, _) = server(move |number, _| {
        let mut answered = answered.lock().unwrap();
        let is_first = !answered.contains(&number);
        answered.push(number);
        is_first.then(|| b":7\r\n".to_vec())
    });
    for _ in 0..3 {
        let answers = client.run(&[vec![b"EXISTS".to_vec(), b"k".to_vec()]]).unwrap().0;
        assert_eq!(answers, [Answer::Int(7)]);
    }
}

#[test]
fn a_refused_read_is_an_error() {
    let (client, _) = server(|_, _| Some(b"-WRONGTYPE a list\r\n".to_vec()));
    let error = client.get(&[], &names(1), &mut [whole(&mut [0; 4])], false).unwrap_err();
    assert!(matches!(&error, Error::Answer(_)), "{error}");
}

#[test]
fn a_refused_command_does_not_spoil_the_others() {
    let (client, _) = server(|_, words| {
        Some(if words[0] == b"BAD" { b"-ERR no\r\n".to_vec() } else { b"*2\r\n$1\r\na\r\n:1\r\n".to_vec() })
    });
    let answers = client.run(&[vec![b"BAD".to_vec()], vec![b"LIST".to_vec()]]).unwrap().0;
    assert!(matches!(&answers[0], Answer::Refused(why) if why.contains("no")), "{answers:?}");
    assert_eq!(answers[1], Answer::List(vec![Answer::Bytes(b"a".to_vec()), Answer::Int(1)]));
}
