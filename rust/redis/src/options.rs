//! Address of a server, credentials and timeouts.

use crate::cluster::Cluster;
use crate::connection::Server;
use crate::error::{Error, Result};
use redis::io::tcp::TcpSettings;
use redis::{Client, ClientTlsConfig, ConnectionAddr, IntoConnectionInfo, RedisConnectionInfo, TlsCertificates};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where a server is.
#[derive(Clone, Debug)]
pub enum Address {
    /// Over TCP.
    Tcp {
        /// Host name or IP address.
        host: String,
        /// Port.
        port: u16,
        /// Set for an encrypted connection.
        tls: Option<Tls>,
    },
    /// A socket of this machine.
    Unix(PathBuf),
}

/// PEM files for an encrypted connection.
#[derive(Clone, Debug, Default)]
pub struct Tls {
    /// Certificate authorities for the server's certificate; the system's if `None`.
    pub ca: Option<PathBuf>,
    /// The client certificate.
    pub cert: Option<PathBuf>,
    /// The key of the client certificate.
    pub key: Option<PathBuf>,
}

/// Connection options. No `Debug`, since it holds a password.
#[derive(Clone)]
pub struct Options {
    /// The server's address.
    pub address: Address,
    /// Whether the server is a node of a cluster.
    pub is_cluster: bool,
    /// User name.
    pub username: Option<String>,
    /// Password.
    pub password: Option<String>,
    /// Number of the database; a cluster has only 0.
    pub db: i64,
    /// How long connecting may take.
    pub connect_timeout: Duration,
    /// How long the server may stay silent. Shared by all silent nodes of a cluster, each of which gets at least a
    /// quarter.
    pub timeout: Duration,
}

impl Options {
    pub(crate) fn server(&self) -> Result<Server> {
        let mut user = RedisConnectionInfo::default().set_db(self.db).set_skip_set_lib_name();
        if let Some(name) = &self.username {
            user = user.set_username(name);
        }
        if let Some(password) = &self.password {
            user = user.set_password(password);
        }
        let (address, tls) = match &self.address {
            Address::Unix(path) => (ConnectionAddr::Unix(path.clone()), None),
            Address::Tcp { host, port, tls: None } => (ConnectionAddr::Tcp(host.clone(), *port), None),
            Address::Tcp { host, port, tls: Some(tls) } => {
                let insecure = false;
                let address = ConnectionAddr::TcpTls { host: host.clone(), port: *port, insecure, tls_params: None };
                (address, Some(tls.read()?))
            }
        };
        // Otherwise the end of a value would wait until the server acknowledges its beginning.
        let tcp = TcpSettings::default().set_nodelay(true);
        let info = address.into_connection_info()?.set_redis_settings(user).set_tcp_settings(tcp);
        match tls {
            tls if self.is_cluster => Ok(Server::Cluster(Cluster::new(info, tls, self.connect_timeout, self.timeout)?)),
            None => Ok(Server::Single(Box::new(Client::open(info)?))),
            Some(tls) => Ok(Server::Single(Box::new(Client::build_with_tls(info, tls)?))),
        }
    }
}

impl Tls {
    fn read(&self) -> Result<TlsCertificates> {
        let read = |path: &Path| std::fs::read(path).map_err(|error| Error::File { path: path.to_owned(), error });
        let cert = self.cert.as_deref().map(read).transpose()?;
        // A certificate file may include the key.
        let key = self.key.as_deref().or(self.cert.as_deref()).map(read).transpose()?;
        let client_tls = cert.zip(key).map(|(client_cert, client_key)| ClientTlsConfig { client_cert, client_key });
        Ok(TlsCertificates { client_tls, root_cert: self.ca.as_deref().map(read).transpose()? })
    }
}
