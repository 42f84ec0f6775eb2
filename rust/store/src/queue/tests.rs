//! The order of operations on one slot.

use super::*;

const HIDDEN: Duration = Duration::from_secs(2);

fn queue() -> Queue {
    Queue::new(
        QueueOptions {
            slots: 4,
            stride: 8192,
            limit: 4 * 8192,
            timeout_base: Duration::from_secs(1),
            threads: 2,
            hidden: HIDDEN,
        },
        100,
    )
}

fn submit(queue: &mut Queue, slots: &[u32]) -> u64 {
    let buffers = (0..queue.memory.reserve(slots.len())).map(|_| Buffer::new(8192)).collect();
    queue.submit_writes(slots, buffers, Instant::now()).unwrap()
}

/// Runs all operations that can run; returns their slots and generations, in order.
fn work(queue: &mut Queue) -> Vec<(&'static str, u32, u64)> {
    let mut done = Vec::new();
    while let Some(job) = queue.next_job() {
        match job {
            Job::Write(run) => {
                for (place, buffer) in run {
                    done.push(("write", place.slot, place.generation));
                    queue.finish_write(place, buffer, Ok(()));
                }
            }
            Job::Read(run) => {
                for (place, buffer) in run {
                    done.push(("read", place.slot, place.generation));
                    queue.finish_read(place, buffer, Ok(()), Instant::now());
                }
            }
            Job::Wipe(place) => {
                done.push(("wipe", place.slot, place.generation));
                queue.finish_wipe(place, Ok(()));
            }
        }
        queue.answered();
    }
    done
}

#[test]
fn one_slot_is_worked_on_in_order_and_others_beside_it() {
    let mut queue = queue();
    submit(&mut queue, &[0]);
    queue.submit_reads(&[0], None, Instant::now()).unwrap();
    submit(&mut queue, &[0, 1]);
    let Some(Job::Write(run)) = queue.next_job() else { unreachable!() };
    let [(place, buffer)] = <[_; 1]>::try_from(run).unwrap();
    assert_eq!(work(&mut queue), [("write", 1, 102)]);
    queue.finish_write(place, buffer, Ok(()));
    assert_eq!(work(&mut queue), [("read", 0, 100), ("write", 0, 101)]);
}

#[test]
fn work_for_a_ticket_that_was_given_up_is_not_done() {
    let mut queue = queue();
    let given_up = submit(&mut queue, &[2]);
    queue.tickets.take(given_up).unwrap();
    let read = queue.submit_reads(&[2], None, Instant::now()).unwrap();
    assert_eq!(work(&mut queue), []);
    assert!(matches!(queue.tickets.take(read).unwrap().blocks[..], [Err(Miss::Lost)]));
    submit(&mut queue, &[3]);
    assert_eq!(work(&mut queue), [("write", 3, 101)]);
    let given_up = queue.submit_reads(&[3, 3], None, Instant::now()).unwrap();
    queue.tickets.take(given_up).unwrap();
    assert_eq!(work(&mut queue), []);
    assert_eq!(queue.stats().pending_bytes, 0);
}
