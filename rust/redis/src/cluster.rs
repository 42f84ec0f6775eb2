//! `Cluster`: which node has which slots, and which nodes are lost. `Nodes`: a connection to each, for one call at a
//! time.
//!
//! A lost node fails only its own commands; the pipeline of the crate's cluster connection would fail as a whole.
//! Encoding, decoding and the slot of a name come from the crate. One lock guards the shared knowledge; it is never
//! held while waiting for a server.

use crate::error::{Error, Result};
use crate::message::{Unit, last_answer};
use redis::cluster::NodeAddress;
use redis::cluster_routing::Slot;
use redis::{Arg, Client, Cmd, ConnectionAddr, ConnectionInfo, ConnectionLike, ErrorKind, RedisError, RedisResult};
use redis::{ServerErrorKind, TlsCertificates, Value, cmd};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum number of times to send a command, as slots may move while it is in flight.
const SENDS: usize = 4;

/// How long to wait before probing a lost node.
const PAUSE: Duration = Duration::from_secs(1);

/// Knowledge of the cluster shared by all connections.
pub(crate) struct Cluster {
    info: ConnectionInfo,
    tls: Option<TlsCertificates>,
    seed: NodeAddress,
    connect_timeout: Duration,
    timeout: Duration,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    nodes: Arc<HashMap<Slot, NodeAddress>>,
    is_current: bool,
    lost: HashMap<NodeAddress, Lost>,
}

struct Lost {
    why: String,
    probe_at: Instant,
}

/// Connections to nodes.
pub(crate) struct Nodes {
    cluster: Arc<Cluster>,
    open: HashMap<NodeAddress, redis::Connection>,
}

/// The results of a call so far.
struct Call {
    until: Instant,
    answers: Vec<Option<Value>>,
    todo: Vec<Todo>,
    /// Why a unit has no answer.
    why: Option<String>,
}

/// A unit to send, by number; its new destination if its slot has moved, and whether the slot is still moving.
#[derive(Clone)]
struct Todo {
    index: usize,
    /// Number of answers that it gets.
    answers: usize,
    needs_all_keys: bool,
    moved_to: Option<NodeAddress>,
    is_asking: bool,
}

/// The units for one node.
struct Part {
    node: NodeAddress,
    packed: Vec<u8>,
    sent: Vec<Todo>,
    /// Whether the connection is older than this call: the server may have closed it.
    is_old: bool,
}

impl Cluster {
    pub(crate) fn new(
        info: ConnectionInfo,
        tls: Option<TlsCertificates>,
        connect_timeout: Duration,
        timeout: Duration,
    ) -> Result<Arc<Self>> {
        let seed = NodeAddress::try_from(info.addr())?;
        Ok(Arc::new(Self { info, tls, seed, connect_timeout, timeout, known: Mutex::default() }))
    }

    pub(crate) fn connect(self: &Arc<Self>) -> Nodes {
        Nodes { cluster: self.clone(), open: HashMap::new() }
    }

    fn connect_to(&self, node: &NodeAddress, most: Duration) -> RedisResult<redis::Connection> {
        let (host, port) = (node.host().to_owned(), node.port());
        let timeout = self.connect_timeout.min(most);
        let connect = |address| self.info.clone().set_addr(address);
        match &self.tls {
            None => Client::open(connect(ConnectionAddr::Tcp(host, port)))?.get_connection_with_timeout(timeout),
            Some(tls) => {
                let address = ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None };
                Client::build_with_tls(connect(address), tls.clone())?.get_connection_with_timeout(timeout)
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lose(&self, node: &NodeAddress, error: RedisError) -> String {
        let why = format!("{node}: {}", Error::from(error));
        let mut known = self.known();
        known.is_current = false;
        known.lost.insert(node.clone(), Lost { why: why.clone(), probe_at: Instant::now() + PAUSE });
        why
    }

    /// Probes lost nodes in background threads, so that no call waits for them.
    fn probe(self: &Arc<Self>) {
        let now = Instant::now();
        let mut known = self.known();
        for (node, lost) in known.lost.iter_mut().filter(|(_, lost)| lost.probe_at <= now) {
            lost.probe_at = now + PAUSE + self.connect_timeout;
            let (cluster, node) = (self.clone(), node.clone());
            let probe = move || {
                let asked = cluster.connect_to(&node, cluster.timeout).and_then(|mut connection| {
                    connection.set_read_timeout(Some(cluster.timeout))?;
                    connection.req_command(&cmd("PING"))?.extract_error()
                });
                match asked {
                    Ok(_) => drop(cluster.known().lost.remove(&node)),
                    Err(error) => drop(cluster.lose(&node, error)),
                }
            };
            // Without a thread, the next call tries again.
            drop(thread::Builder::new().name("blockyard-probe".to_owned()).spawn(probe));
        }
    }
}

impl Nodes {
    /// Runs `count` units. Returns the answer to each, `None` if its node does not answer, and the reason.
    ///
    /// # Errors
    /// No node answers.
    pub(crate) fn run(
        &mut self,
        count: usize,
        make: impl Fn(usize) -> Unit,
    ) -> Result<(Vec<Option<Value>>, Option<String>)> {
        self.cluster.probe();
        let todo = (0..count)
            .map(|index| Todo { index, answers: 1, needs_all_keys: false, moved_to: None, is_asking: false })
            .collect();
        let answers = vec![None; count];
        let mut call = Call { until: Instant::now() + self.cluster.timeout, answers, todo, why: None };
        for _ in 0..SENDS {
            self.learn(&mut call)?;
            let mut parts = self.sort(&mut call, &make);
            parts.retain_mut(|part| match self.send(part, &call) {
                Ok(()) => true,
                Err(error) => {
                    self.fail(part, 0, error, &mut call);
                    false
                }
            });
            for part in &parts {
                self.receive(part, &mut call);
            }
            if call.todo.is_empty() {
                break;
            }
        }
        if !call.todo.is_empty() {
            call.why = Some("slots move too often".to_owned());
        }
        let known = self.cluster.known();
        match call.why {
            Some(why) if known.nodes.values().all(|node| known.lost.contains_key(node)) => Err(Error::Lost(why)),
            why => Ok((call.answers, why)),
        }
    }

    /// Asks a live node for the slot assignment, if it may have changed.
    fn learn(&mut self, call: &mut Call) -> Result<()> {
        let mut nodes: Vec<NodeAddress> = {
            let mut known = self.cluster.known();
            if std::mem::replace(&mut known.is_current, true) && !known.nodes.is_empty() {
                return Ok(());
            }
            let found: HashSet<_> = known.nodes.values().chain([&self.cluster.seed]).collect();
            found.into_iter().filter(|node| !known.lost.contains_key(node)).cloned().collect()
        };
        nodes.sort_by_key(|node| !self.open.contains_key(node));
        for node in nodes {
            let mut part = Part { node: node.clone(), packed: Vec::new(), sent: Vec::new(), is_old: false };
            cmd("CLUSTER").arg("SLOTS").write_packed_command(&mut part.packed);
            let asked = self.send(&mut part, call).and_then(|()| self.be_patient(&node, call));
            let asked = asked.and_then(|()| self.receive_one(&node));
            match asked.and_then(Value::extract_error).map(|value| slots_of(value, node.host())) {
                Ok(nodes) => {
                    let mut known = self.cluster.known();
                    let is_used = |node: &NodeAddress| nodes.values().any(|other| other == node);
                    known.lost.retain(|node, _| is_used(node) || *node == self.cluster.seed);
                    known.nodes = Arc::new(nodes);
                    return Ok(());
                }
                Err(error) => self.fail(&part, 0, error, call),
            }
        }
        let mut known = self.cluster.known();
        known.is_current = false;
        if known.nodes.is_empty() {
            let lost = known.lost.values().next().map(|lost| lost.why.clone());
            return Err(Error::Lost(lost.unwrap_or_else(|| "no node of the cluster answers".to_owned())));
        }
        Ok(())
    }

    /// Groups the pending units by node, the first unit's node first; units of lost nodes are finished.
    fn sort(&self, call: &mut Call, make: &impl Fn(usize) -> Unit) -> Vec<Part> {
        let known = self.cluster.known();
        let nodes = known.nodes.clone();
        let lost: HashMap<_, _> = known.lost.iter().map(|(node, lost)| (node.clone(), lost.why.clone())).collect();
        drop(known);
        let mut parts: Vec<Part> = Vec::new();
        for mut todo in std::mem::take(&mut call.todo) {
            let Unit { slot, commands } = make(todo.index);
            let Some(node) = todo.moved_to.as_ref().or_else(|| nodes.get(&slot)) else {
                call.why = Some("no node has the slot".to_owned());
                continue;
            };
            if let Some(why) = lost.get(node) {
                call.why = Some(why.clone());
                continue;
            }
            let found = parts.iter().position(|part| part.node == *node).unwrap_or_else(|| {
                parts.push(Part { node: node.clone(), packed: Vec::new(), sent: Vec::new(), is_old: false });
                parts.len() - 1
            });
            let part = &mut parts[found];
            if todo.is_asking {
                cmd("ASKING").write_packed_command(&mut part.packed);
            }
            for command in &commands {
                command.write_packed_command(&mut part.packed);
            }
            todo.answers = commands.len();
            todo.needs_all_keys = commands.len() > 1 || commands.iter().any(is_script);
            part.sent.push(todo);
        }
        parts
    }

    fn send(&mut self, part: &mut Part, call: &Call) -> RedisResult<()> {
        let most = self.left(call);
        part.is_old = self.open.contains_key(&part.node);
        if !part.is_old {
            self.open.insert(part.node.clone(), self.cluster.connect_to(&part.node, most)?);
        }
        let connection = self.connection(&part.node)?;
        connection.set_write_timeout(Some(most))?;
        connection.send_packed_command(&part.packed)
    }

    fn receive(&mut self, part: &Part, call: &mut Call) {
        if let Err(error) = self.be_patient(&part.node, call) {
            return self.fail(part, 0, error, call);
        }
        for (position, todo) in part.sent.iter().enumerate() {
            let asked = if todo.is_asking { self.receive_one(&part.node).map(drop) } else { Ok(()) };
            match asked.and_then(|()| last_answer(todo.answers, || self.receive_one(&part.node))) {
                Ok(value) => self.take(todo, value, call),
                Err(error) => return self.fail(part, position, error, call),
            }
        }
    }

    fn be_patient(&mut self, node: &NodeAddress, call: &Call) -> RedisResult<()> {
        let most = self.left(call);
        self.connection(node)?.set_read_timeout(Some(most))
    }

    fn receive_one(&mut self, node: &NodeAddress) -> RedisResult<Value> {
        self.connection(node)?.recv_response()
    }

    /// Takes an answer, or resends the unit to where its slot has moved. A transaction or script is not resent while
    /// its slot is moving: some of its keys may still be where the slot was.
    fn take(&self, todo: &Todo, value: Value, call: &mut Call) {
        let Value::ServerError(error) = &value else {
            call.answers[todo.index] = Some(value);
            return;
        };
        let error = RedisError::from(error.clone());
        let ErrorKind::Server(kind) = error.kind() else {
            call.answers[todo.index] = Some(value);
            return;
        };
        match kind {
            ServerErrorKind::Ask if todo.needs_all_keys => call.answers[todo.index] = Some(value),
            ServerErrorKind::Moved | ServerErrorKind::Ask => {
                let is_asking = kind == ServerErrorKind::Ask;
                self.cluster.known().is_current &= is_asking;
                let moved_to = error.redirect_node().and_then(|(node, _)| NodeAddress::try_from(node).ok());
                call.todo.push(Todo { moved_to, is_asking, ..*todo });
            }
            ServerErrorKind::ClusterDown | ServerErrorKind::MasterDown | ServerErrorKind::BusyLoading => {
                self.cluster.known().is_current = false;
                call.why = Some(error.to_string());
            }
            _ => call.answers[todo.index] = Some(value),
        }
    }

    /// Drops a connection that failed. Commands from `position` on are sent again if the server had closed an idle one;
    /// else the node is lost.
    fn fail(&mut self, part: &Part, position: usize, error: RedisError, call: &mut Call) {
        self.open.remove(&part.node);
        if part.is_old && error.is_connection_dropped() && !error.is_timeout() {
            call.todo.extend_from_slice(&part.sent[position..]);
        } else {
            call.why = Some(self.cluster.lose(&part.node, error));
        }
    }

    /// How long a node may be silent. All nodes share the call's time: once silent nodes have used it up, none is left.
    fn left(&self, call: &Call) -> Duration {
        call.until.saturating_duration_since(Instant::now()).max(self.cluster.timeout / 4)
    }

    fn connection(&mut self, node: &NodeAddress) -> RedisResult<&mut redis::Connection> {
        self.open.get_mut(node).ok_or_else(|| RedisError::from((ErrorKind::Client, "not connected")))
    }
}

fn is_script(command: &Cmd) -> bool {
    matches!(command.args_iter().next(), Some(Arg::Simple(b"EVAL")))
}

/// Reads the answer to CLUSTER SLOTS: first slot, last slot, and the primary's host and port. A node without a name is
/// the node that answered.
fn slots_of(answer: Value, asked: &str) -> HashMap<Slot, NodeAddress> {
    let mut nodes = HashMap::new();
    let Value::Array(ranges) = answer else { return nodes };
    for range in ranges {
        let Value::Array(range) = range else { continue };
        let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = &range[..] else { continue };
        let (host, port) = match &primary[..] {
            [Value::BulkString(host), Value::Int(port), ..] => (String::from_utf8_lossy(host), *port),
            [Value::Nil, Value::Int(port), ..] => ("".into(), *port),
            _ => continue,
        };
        let Ok(port) = u16::try_from(port) else { continue };
        let node = NodeAddress::new(if host.is_empty() { asked } else { &*host }, port);
        let slots = (*first..=*last).filter_map(|slot| Slot::new(u16::try_from(slot).ok()?));
        nodes.extend(slots.map(|slot| (slot, node.clone())));
    }
    nodes
}
